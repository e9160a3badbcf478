"""The paths of a job of several hosts in the run's directory: messages, named pipes and logs."""

from __future__ import annotations

import os


def agent_config_file(directory: str) -> str:
    """The path of the AgentConfig."""
    return os.path.join(directory, "agent.json")


def agent_report_file(directory: str) -> str:
    """The path of the AgentReport."""
    return os.path.join(directory, "report.json")


def rank_config_file(directory: str, local_rank: int) -> str:
    """The path of a rank's RankConfig."""
    return os.path.join(directory, f"rank-{local_rank}.json")


def rank_pipe(directory: str, local_rank: int, descriptor: int) -> str:
    """The path of the named pipe for a rank's stdout (1) or stderr (2)."""
    return os.path.join(directory, f"rank-{local_rank}.{descriptor}")


def agent_pipe(directory: str, descriptor: int) -> str:
    """The path of the named pipe for the agent's stdout (1) or stderr (2)."""
    return os.path.join(directory, f"agent.{descriptor}")


def logs_pipe(directory: str, descriptor: int) -> str:
    """The path of the named pipe in which the agent shows the ranks' logs of stdout (1) or stderr (2)."""
    return os.path.join(directory, f"logs.{descriptor}")


def private_store(directory: str) -> str:
    """The path of the file of a rendezvous with store_type=file for which the user named none."""
    return os.path.join(directory, "store")


def private_logs(directory: str) -> str:
    """The path of the folder for logs that torch writes and the user did not ask for."""
    return os.path.join(directory, "logs")
