"""The program that torch's agent starts for each rank: it binds itself and executes the rank's command.

Its arguments are the run's directory, the local rank and the agent's pid. Python starts it with -I -S, because it needs
only the standard library and this package, and must import nothing of the user's.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpulaunch.launch.hosts.agent.messages import RankConfig, RankPipe
    from cpulaunch.records.errors import CpulaunchError

FAILED = 125


def become_rank(config: RankConfig, *, agent: int) -> int:
    """The exit code where this process could not execute the rank's command, with one error on stderr.

    Effect: executes the command.
    """
    from cpulaunch.launch.process.program import child_environ
    from cpulaunch.launch.process.replace import restore_dispositions
    from cpulaunch.records.errors import LEAVE_FOLDERS
    from cpulaunch.system.libc import die_with_parent

    die_with_parent(9, parent=agent)
    try:
        for pipe in config.pipes:
            _redirect(pipe)
    except OSError as error:
        return _print_error(f"cannot write the output of this rank: {error}\nhint: {LEAVE_FOLDERS}", FAILED)
    try:
        _bind(config)
    except OSError as error:
        return _print_error(f"cannot bind this rank: {error.strerror}\nhint: try --binder none", FAILED)
    restore_dispositions()
    try:
        os.execve(config.path, config.argv, child_environ(os.environ, config.env))
    except OSError as error:
        failure = _exec_error(config.path, error.errno or 0)
        return _print_error(str(failure), failure.exit_code)


def _exec_error(path: str, code: int) -> CpulaunchError:
    """The error for a command that existed when the job started, and cannot be executed now."""
    from cpulaunch.launch.process.program import exec_error, find_executable
    from cpulaunch.records.errors import CpulaunchError

    try:
        find_executable(path, {})
    except CpulaunchError as error:
        return error
    return exec_error(path, code)


def _bind(config: RankConfig) -> None:
    """Effect: this process is bound as planned. Raises: OSError."""
    if not config.cpus and config.policy is None:
        return
    from cpulaunch.launch.process.bind import Binding, apply_binding
    from cpulaunch.system.mempolicy import Policy

    policy = None
    if config.policy is not None:
        mode, numa_nodes = config.policy
        policy = Policy(mode=mode, numa_nodes=frozenset(numa_nodes))
    apply_binding(Binding(cpus=frozenset(config.cpus), policy=policy))


def _redirect(pipe: RankPipe) -> None:
    """Effect: the descriptor is the rank's own pipe, unless torch's agent sent it to a file."""
    from cpulaunch.system.files.writing import open_output_pipe

    if os.path.samestat(os.fstat(pipe.descriptor), os.stat(pipe.agent_path)):
        own = open_output_pipe(pipe.path)
        os.dup2(own, pipe.descriptor)
        os.close(own)


def _print_error(text: str, code: int) -> int:
    from cpulaunch.records.errors import escaped_lines

    os.write(2, f"cpulaunch: error: {escaped_lines(text)}\n".encode(errors="backslashreplace"))
    return code


def main(arguments: Sequence[str]) -> int:
    """The exit code of `shim.py DIRECTORY LOCAL_RANK AGENT_PID` where it could not execute the rank's command."""
    from cpulaunch.launch.hosts.agent.files import rank_config_file
    from cpulaunch.launch.hosts.agent.messages import RankConfig, read_message
    from cpulaunch.records.errors import LEAVE_FOLDERS

    directory, local_rank, agent = arguments
    path = rank_config_file(directory, int(local_rank))
    try:
        config = read_message(path, RankConfig)
    except OSError as error:
        hint = "the launcher removes this file when it ends: was it killed?"
        return _print_error(f"cannot read what this rank is to run: {error}\nhint: {hint}", FAILED)
    except (ValueError, TypeError, RecursionError):  # A rank of the attempt before may have written anything there.
        text = f"cannot read what this rank is to run: {path} was replaced\nhint: {LEAVE_FOLDERS}"
        return _print_error(text, FAILED)
    return become_rank(config, agent=int(agent))


if __name__ == "__main__":
    # Last, so that the standard library's modules are found first.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
    sys.exit(main(sys.argv[1:]))
