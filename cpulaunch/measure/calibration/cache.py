"""The calibrations of this user, one a line, by machine and build of torch. A launch reads them if there are any."""

from __future__ import annotations

import os

from cpulaunch.probe.software.oneccl import host_name
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.host import UNITS, Calibration, CalibrationFigure
from cpulaunch.records.record import replace
from cpulaunch.system.files.caches import read_lines, replace_cache
from cpulaunch.system.root import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.records.host import Host

HEADER = "cpulaunch calibration 1"
FILE = "calibration"
"""Its name in the folder of caches."""
MAX_BYTES = 1 << 20
MAX_ENTRIES = 64
DISTURBED = " disturbed"


def fingerprint(host: Host) -> str:
    """The machine, its CPUs that may be used, and the build of torch, in one line without a tab."""
    torch = host.torch
    parts = (
        host_name(Root()),
        host.cpu.model_name or host.arch,
        format_cpulist(host.limits.budget.cpus),
        host.limits.budget.threads,
        "no torch" if torch is None else torch.version,
        "" if torch is None else torch.path,
        "" if torch is None else _changed_at(f"{torch.path}/version.py"),
    )
    return ascii("|".join(map(str, parts)))


def _changed_at(path: str) -> str:
    try:
        return str(os.stat(path).st_mtime_ns)
    except OSError:
        return ""


def read_calibration(path: str, host: Host) -> Calibration | None:
    """The calibration of this machine and torch; None if there is none, or other users could have changed it."""
    key = fingerprint(host)
    for line in read_lines(path, header=HEADER, max_bytes=MAX_BYTES):
        name, _, text = line.partition("\t")
        if name == key:
            return decode(text)
    return None


def with_calibration(host: Host, folder: str) -> Host:
    """The host with its calibration in this folder of caches, if there is one."""
    return replace(host, calibration=read_calibration(f"{folder}/{FILE}", host))


def write_calibration(path: str, host: Host, calibration: Calibration) -> None:
    """Effect: adds the calibration to the file, or replaces that of this machine and torch."""
    key = fingerprint(host)
    others = [line for line in read_lines(path, header=HEADER, max_bytes=MAX_BYTES) if line.partition("\t")[0] != key]
    replace_cache(path, [*others[-MAX_ENTRIES + 1 :], f"{key}\t{encode(calibration)}"], header=HEADER)


def encode(calibration: Calibration) -> str:
    """A calibration as one line of text, without its failures."""
    rows = (f"{each.kind}={each.subject}={each.value!r}" for each in calibration.figures)
    return "\t".join([calibration.date + DISTURBED * calibration.disturbed, *rows])


def decode(text: str) -> Calibration | None:
    """The calibration that `encode` wrote as this text; None if the text is something else."""
    date, *rows = text.split("\t")
    figures = []
    for row in rows:
        kind, _, rest = row.partition("=")
        subject, _, value = rest.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            return None
        if kind not in UNITS or not subject or not 0 < number < 1e15:
            return None
        figures.append(CalibrationFigure(kind, subject, number))
    if not figures:
        return None
    return Calibration(date=date.removesuffix(DISTURBED), figures=tuple(figures), disturbed=date.endswith(DISTURBED))
