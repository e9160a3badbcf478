"""Shared by the worker tests: programs run in a process with given settings, and their outcomes."""

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from cpulaunch.records.torch_settings import VARIABLE, TorchSettings, encode

HERE = Path(__file__).parent
DEADLINE_SECONDS = 300
FOREIGN = ("OMP_", "GOMP_", "KMP_", "MKL_", "LD_PRELOAD", "CPULAUNCH_", "TORCH_")
"""Prefixes of variables that would influence the tests if they were inherited."""


def without_gloo(text):
    """What a program printed, without the lines that gloo of torch 2.8 writes to stdout."""
    return re.sub(r"\[Gloo\] Rank .*\n", "", text)


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    def __post_init__(self):
        self.out = without_gloo(self.out)

    @property
    def cpulaunch_lines(self):
        """The lines of stderr that cpulaunch wrote."""
        return [line for line in self.err.splitlines() if line.startswith("cpulaunch: ")]


def clean_environment(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = os.pathsep.join(filter(None, (str(HERE.parent.parent), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, **variables}


def case(program, *, before="", env=None, settings=None, **chosen):
    """One case for `run_cases`: a program, its settings, and code to run before the settings are applied."""
    text = encode(TorchSettings(**chosen)) if settings is None else settings
    return {
        "env": {VARIABLE: text, **(env or {})},
        "before": textwrap.dedent(before),
        "program": textwrap.dedent(program),
    }


def run_cases(cases, tmp_path, *, interpreter=sys.executable):
    """Name -> Outcome of every case; torch is imported once."""
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    done = run_python(HERE / "forking.py", path, argv=(interpreter,))
    assert done.code == 0, done.err
    return {name: Outcome(**fields) for name, fields in json.loads(done.out).items()}


def run_python(*arguments, env=None, argv=(sys.executable,)):
    done = subprocess.run(
        [*map(str, argv), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        env=clean_environment(**(env or {})),
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def events(path, kind=None):
    """The events in a file, all or of one kind."""
    parsed = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [event for event in parsed if kind in (None, event["event"])]
