"""The files of a job of several hosts, in the run's directory: orders, reports and named pipes."""

from __future__ import annotations

import os


def orders_file(directory: str) -> str:
    """What the agent is to do."""
    return os.path.join(directory, "agent.json")


def report_file(directory: str) -> str:
    """What became of it, in the agent's words."""
    return os.path.join(directory, "report.json")


def rank_file(directory: str, local_rank: int) -> str:
    """What a rank is to do."""
    return os.path.join(directory, f"rank-{local_rank}.json")


def rank_pipe(directory: str, local_rank: int, number: int) -> str:
    """A rank's own stdout (1) or stderr (2)."""
    return os.path.join(directory, f"rank-{local_rank}.{number}")


def agent_pipe(directory: str, number: int) -> str:
    """The agent's own stdout (1) or stderr (2)."""
    return os.path.join(directory, f"agent.{number}")


def private_logs(directory: str) -> str:
    """Where torch writes what nobody asked for."""
    return os.path.join(directory, "logs")
