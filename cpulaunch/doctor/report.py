"""The report of `cpulaunch doctor`: every check with its finding, the reason, and the command that fixes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpulaunch.doctor import gpus, machine, software
from cpulaunch.doctor.collectives import collectives
from cpulaunch.doctor.facts import Facts, gather_facts
from cpulaunch.doctor.findings import Check, Finding
from cpulaunch.doctor.torch_report import Runner, run_program
from cpulaunch.probe import Root
from cpulaunch.records.errors import escaped
from cpulaunch.records.host import Host, count_text
from cpulaunch.records.request import WorkerPython
from cpulaunch.view.text import painter, wrapped

CHECKS: Mapping[str, Check] = {
    "Python": software.python,
    "torch": software.torch,
    "plugin": software.plugin,
    "other users": software.code_of_others,
    "torch's OpenMP": software.loaded_runtimes,
    "allocator": machine.allocator,
    "OpenMP runtime": machine.openmp,
    "OpenMP in wheels": machine.two_runtimes,
    "MKL on AMD": software.mkl_on_amd,
    "AMX": software.hidden_amx,
    "CPU features": machine.cpu_features,
    "CPU topology": machine.cpu_topology,
    "environment": software.environment,
    "CPU quota": machine.cpu_quota,
    "SMT siblings": machine.smt_siblings,
    "memory policy": machine.memory_policy,
    "GPUs": gpus.gpu_driver,
    "MIG devices": gpus.gpu_names,
    "GPU neighbours": gpus.gpu_locality,
    "collectives": collectives,
    "/dev/shm": machine.shared_memory,
    "swap": machine.swap,
    "huge pages": machine.huge_pages,
    "NUMA balancing": machine.numa_balancing,
    "governor": machine.governor,
}
"""Every check, in the order of the report."""

STYLES = {"ok": "green", "advice": "yellow", "problem": "red", "skipped": "dim"}
LABELS = {"ok": "OK", "advice": "advice", "problem": "problem", "skipped": "skipped"}
STATUS_WIDTH, NAME_WIDTH = 8, 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The findings of all checks, each with the name of its check."""

    findings: tuple[tuple[str, Finding], ...]

    @property
    def exit_code(self) -> int:
        """1 if any check found a problem, else 0."""
        return int(any(finding.status == "problem" for _, finding in self.findings))

    def as_json(self) -> dict[str, Any]:
        """The report as one object."""
        checks = [
            {"check": name, "status": each.status, "found": each.found, "why": each.why, "fix": each.fix}
            for name, each in self.findings
        ]
        return {"schema": 1, "checks": checks, "problems": self._count("problem"), "advice": self._count("advice")}

    def as_text(self, *, width: int, color: bool) -> str:
        """The report as text for a person; commands are never broken over lines."""
        lines = [line for name, finding in self.findings for line in _lines(name, finding, width=width, color=color)]
        problems, advice = self._count("problem"), self._count("advice")
        total = f"{count_text(problems, 'problem') if problems else 'no problems'}, {count_text(advice, 'suggestion')}"
        return "\n".join([*lines, "", total])

    def _count(self, status: str) -> int:
        return sum(finding.status == status for _, finding in self.findings)


def doctor_report(
    host: Host, *, root: Root, python: WorkerPython, environ: Mapping[str, str], run: Runner = run_program
) -> Report:
    """The findings of all checks. Effect: on this machine, starts this Python once to examine its torch."""
    return run_checks(gather_facts(host, root=root, python=python, environ=environ, run=run))


def run_checks(facts: Facts) -> Report:
    """The findings of all checks for these facts."""
    return Report(findings=tuple((name, finding) for name, check in CHECKS.items() for finding in check(facts)))


def _lines(name: str, finding: Finding, *, width: int, color: bool) -> list[str]:
    label = f"{LABELS[finding.status]:<{STATUS_WIDTH}}"
    lines = wrapped(finding.found, width, head=f"{label}{name:<{NAME_WIDTH}}", indent=STATUS_WIDTH + NAME_WIDTH)
    lines[0] = painter(STYLES[finding.status], color=color)(label) + lines[0][len(label) :]
    if finding.why is not None:
        lines += wrapped(finding.why, width, head=" " * STATUS_WIDTH + "why: ")
    if finding.fix is not None:
        lines += [f"{' ' * STATUS_WIDTH}fix: {escaped(finding.fix)}"]
    return lines
