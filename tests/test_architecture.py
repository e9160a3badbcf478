"""The structure of the package: tests/architecture.py holds the rules; each is shown to find a planted violation."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture import (
    MAX_LINES,
    MAX_MODULES,
    MAY_IMPORT,
    RULES,
    Package,
    crowded_folders,
    cycles,
    file_effects,
    folders_without_purpose,
    impure_imports,
    repeated_class_names,
    torch_imports,
    upward_imports,
)

PACKAGE = Path(__file__).parent.parent / "cpulaunch"
Rule = Callable[[Package], list[str]]


@pytest.fixture(scope="module")
def package() -> Package:
    """cpulaunch itself, parsed once."""
    return Package(PACKAGE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_follows(rule: Rule, package: Package) -> None:
    assert rule(package) == []


def test_the_table_of_layers_names_what_exists(package: Package) -> None:
    named = set(MAY_IMPORT) | {target for targets in MAY_IMPORT.values() for target in targets}
    assert named <= {package.folder_of(module) for module in package.trees}


PLANTED: dict[str, tuple[Rule, dict[str, str], str]] = {
    "an import that runs upwards": (
        upward_imports,
        {"records/host.py": "from cpulaunch.plan.planner import make_plan\n", "plan/planner.py": "make_plan = 1\n"},
        "records.host imports plan.planner",
    ),
    "an import upwards inside a function": (
        upward_imports,
        {"plan/notes.py": "def f():\n    import cpulaunch.cli.main\n", "cli/main.py": ""},
        "plan.notes imports cli.main",
    ),
    "an import between sub-packages": (
        upward_imports,
        {"plan/variables/openmp.py": "from cpulaunch.plan.ranks import job\n", "plan/ranks/job.py": ""},
        "plan.variables.openmp imports plan.ranks.job",
    ),
    "a launch that imports the planner": (
        upward_imports,
        {"launch/run.py": "import cpulaunch.plan.planner\n", "plan/planner.py": ""},
        "launch.run imports plan.planner",
    ),
    "a cycle of modules, one way for type checkers only": (
        cycles,
        {
            "view/a.py": "from cpulaunch.view.b import B\n",
            "view/b.py": "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from cpulaunch.view.a import A\n",
        },
        "modules: view.",
    ),
    "a cycle of folders without one of modules": (
        cycles,
        {
            "view/a.py": "import cpulaunch.emit.b\n",
            "emit/b.py": "",
            "emit/c.py": "import cpulaunch.view.d\n",
            "view/d.py": "",
        },
        "folders: ",
    ),
    "a folder with too many modules": (
        crowded_folders,
        {f"view/module_{number}.py": "" for number in range(MAX_MODULES + 1)},
        f"view: {MAX_MODULES + 1} modules",
    ),
    "a loose module at the top": (crowded_folders, {"helpers.py": ""}, "helpers: loose at the top"),
    "a module of too many lines": (
        crowded_folders,
        {"view/long.py": "x = 1\n" * (MAX_LINES + 1)},
        "view.long: 401 lines",
    ),
    "a folder without a purpose": (
        folders_without_purpose,
        {"view/__init__.py": '"""Views"""\n'},
        "view: its docstring",
    ),
    "a folder without an __init__": (folders_without_purpose, {"tools/a.py": ""}, "tools: no __init__.py"),
    "a clock in the state machine": (
        impure_imports,
        {"launch/supervision/state_machine.py": "import time\n"},
        "launch.supervision.state_machine imports time",
    ),
    "files in a view": (impure_imports, {"view/map.py": "from pathlib import Path\n"}, "view.map imports pathlib"),
    "processes in planning": (
        impure_imports,
        {"plan/ranks/job.py": "def f():\n    from subprocess import run\n"},
        "plan.ranks.job imports subprocess",
    ),
    "torch in the launcher": (
        torch_imports,
        {"launch/run.py": "import torch.distributed\n"},
        "launch.run imports torch",
    ),
    "numpy in the worker": (torch_imports, {"worker/apply.py": "import numpy as np\n"}, "worker.apply imports numpy"),
    "a file made outside the folder for it": (
        file_effects,
        {"launch/run.py": "import os\ndef f(path):\n    os.mkdir(path)\n", "system/files/a.py": "os.mkdir('x')\n"},
        "launch.run, line 3: os.mkdir",
    ),
    "a file opened for writing": (
        file_effects,
        {"cli/report.py": "open('/proc/self/oom_score_adj', 'w')\nopen('a')\nopen(path, mode='a')\n"},
        "cli.report, line 3: open",
    ),
    "a descriptor opened for writing": (
        file_effects,
        {"worker/a.py": "os.open(os.devnull, os.O_WRONLY)\nos.open(p, os.O_RDONLY)\nos.open(p, os.O_RDWR)\n"},
        "worker.a, line 3: os.open",
    ),
    "a file written through a path object": (
        file_effects,
        {"emit/slurm.py": "def f(path, text):\n    path.write_text(text.replace('a', 'b'))\n"},
        "emit.slurm, line 2: path.write_text",
    ),
    "two classes of one name": (
        repeated_class_names,
        {"view/a.py": "class Row: ...\n", "emit/b.py": "class Row: ...\n"},
        "Row: emit.b, view.a",
    ),
}


@pytest.mark.parametrize(("rule", "files", "expected"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_found(rule: Rule, files: dict[str, str], expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "cpulaunch"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for each in {parent for name in files for parent in (folder / name).parents if parent.is_relative_to(folder)}:
        if not (each / "__init__.py").exists() and each.name != "tools":
            (each / "__init__.py").write_text(f'"""What {each.name} is for."""\n')
    found = rule(Package(folder))
    assert len(found) == 1
    assert expected in found[0]


HEAVY = (
    "typing",
    "re",
    "enum",
    "dataclasses",
    "contextlib",
    "functools",
    "collections",
    "json",
    "pathlib",
    "subprocess",
)
HOT_PATH = (
    "import cpulaunch.cli.main, cpulaunch.cli.run, cpulaunch.launch.process.replace, cpulaunch.profile.presets, "
    "cpulaunch.schedulers.layer, cpulaunch.plan.ranks.job_ranks, cpulaunch.cli.pet_variables, "
    "cpulaunch.plan.plugin.collectives, cpulaunch.cli.collective_timings"
)
SUPERVISED_PATH = (
    f"{HOT_PATH}, cpulaunch.launch.process.guard, cpulaunch.launch.output.routing, cpulaunch.launch.ranks.engine, "
    "cpulaunch.launch.ranks.output, cpulaunch.launch.supervision.supervise, cpulaunch.launch.supervision.failure_text"
)
MAX_OWN_MODULES = 69
"""cpulaunch's modules, folders included, that `cpulaunch SCRIPT` imports before it replaces itself by the script."""


def imported_by(code: str) -> list[str]:
    """The names of all modules that an isolated interpreter has imported after the code."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {code}; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("path", [HOT_PATH, SUPERVISED_PATH])
def test_a_launch_imports_little(path: str) -> None:
    """Each of these costs a launch 2 to 20 ms; see records/record.py."""
    assert not set(HEAVY) & set(imported_by(path))


def test_a_launch_imports_few_modules_of_its_own() -> None:
    """Every module costs a launch about 0.1 ms."""
    ours = [
        name for name in imported_by("import cpulaunch.cli.main, cpulaunch.cli.run") if name.startswith("cpulaunch")
    ]
    assert len(ours) <= MAX_OWN_MODULES
