"""Between torch's agent and each rank: this file, run as a program, binds itself and becomes the real command.

It gets a rank's file (see rank_orders) and the agent's pid. Python starts it with -I -S, as nothing but the standard
library and this package is needed, and nothing of the user's may come in.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from cpulaunch.launch.process.exec_spec import ExecSpec
    from cpulaunch.records.errors import CpulaunchError

FAILED = 125


def rank_orders(
    spec: ExecSpec, changes: Sequence[tuple[str, str | None]], pipes: Mapping[int, tuple[str, str]]
) -> dict[str, Any]:
    """What a rank's file says: what to execute, how to change the agent's environment, what to bind to.

    `pipes`: for stdout (1) and stderr (2) the rank's own named pipe, and the agent's that it would share otherwise.
    """
    policy = spec.binding.policy
    return {
        "path": spec.path,
        "argv": spec.argv,
        "changes": list(changes),
        "cpus": sorted(spec.binding.cpus),
        "policy": None if policy is None else [policy.mode, sorted(policy.numa_nodes)],
        "pipes": [[number, own, shared] for number, (own, shared) in pipes.items()],
    }


def become_rank(orders: Mapping[str, Any], *, agent: int) -> int:
    """The exit code of this process where it could not become the rank, with one error on stderr.

    Effect: executes the rank's command.
    """
    from cpulaunch.launch.process.program import child_environ
    from cpulaunch.launch.process.replace import restore_dispositions
    from cpulaunch.system.libc import die_with_parent

    die_with_parent(9, parent=agent)
    for number, own, shared in orders["pipes"]:
        _take_over(number, own, shared=shared)
    try:
        _bind(orders)
    except OSError as error:
        return _complain(f"error: this rank cannot be bound: {error.strerror}\nhint: try --binder none", FAILED)
    restore_dispositions()
    environ = child_environ(os.environ, [(name, value) for name, value in orders["changes"]])
    try:
        os.execve(orders["path"], orders["argv"], environ)
    except OSError as error:
        failure = _why_not(orders["path"], error.errno or 0)
        return _complain(str(failure), failure.exit_code)


def _why_not(path: str, code: int) -> CpulaunchError:
    """The error for a command that was found when the job started, and cannot be executed now."""
    from cpulaunch.launch.process.program import exec_failure, find_executable
    from cpulaunch.records.errors import CpulaunchError

    try:
        find_executable(path, {})
    except CpulaunchError as error:
        return error
    return exec_failure(path, code)


def _bind(orders: Mapping[str, Any]) -> None:
    """Effect: this process is bound as planned. Raises: OSError."""
    if not orders["cpus"] and orders["policy"] is None:
        return
    from cpulaunch.launch.process.bind import Binding, apply_binding
    from cpulaunch.system.mempolicy import Policy

    policy = orders["policy"]
    apply_binding(
        Binding(
            cpus=frozenset(orders["cpus"]),
            policy=None if policy is None else Policy(mode=policy[0], numa_nodes=frozenset(policy[1])),
        )
    )


def _take_over(number: int, path: str, *, shared: str) -> None:
    """Effect: the descriptor is the rank's own pipe, unless torch's agent sent it to a file."""
    if os.path.samestat(os.fstat(number), os.stat(shared)):
        own = os.open(path, os.O_WRONLY)
        os.dup2(own, number)
        os.close(own)


def _complain(text: str, code: int) -> int:
    os.write(2, f"{text}\n".encode(errors="backslashreplace"))
    return code


def main(arguments: Sequence[str]) -> int:
    """The exit code of `shim.py DIRECTORY LOCAL_RANK AGENT`, if it comes to that."""
    import json

    from cpulaunch.launch.hosts.agent.files import rank_file

    directory, local_rank, agent = arguments
    try:
        with open(rank_file(directory, int(local_rank))) as file:
            orders = json.load(file)
    except OSError as error:
        return _complain(f"error: this rank has no orders: {error}\nhint: was the launcher killed?", FAILED)
    return become_rank(orders, agent=int(agent))


if __name__ == "__main__":
    # Last, so that the standard library's modules are found first.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))
    sys.exit(main(sys.argv[1:]))
