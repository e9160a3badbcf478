"""The layers: who may import whom, and where effects live. The table is the architecture."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cpulaunch"
DATA = {
    "errors",
    "endpoint",
    "cpulist",
    "record",
    "kinds",
    "settings",
    "host",
    "request",
    "torch_settings",
    "ccl_settings",
}
MAY_IMPORT = {
    "errors": set(),
    "endpoint": {"errors"},
    "cpulist": set(),
    "record": set(),
    "kinds": {"cpulist", "record"},
    "settings": {"kinds", "record"},
    "host": {"record"},
    "torch_settings": {"record"},
    "ccl_settings": {"record"},
    "live": {"cpulist", "record"},
    "leftovers": set(),
    "request": {"record", "settings"},
    "preset_table": set(),
    "profile_model": DATA,
    "toml_lines": set(),
    "profile_schema": DATA | {"profile_model"},
    "profile_file": DATA | {"profile_model", "profile_schema", "toml_lines"},
    "profile": DATA | {"preset_table", "profile_model", "profile_file"},
    "schedulers": DATA | {"schedulers"},
    "plan": DATA | {"plan"},
    "probe": DATA | {"probe"},
    "launch": DATA | {"launch", "live", "leftovers", "plan.model"},
    "worker": DATA | {"worker", "live", "leftovers"},
    "cli": DATA
    | {"cli", "schedulers", "plan", "probe", "launch", "profile", "profile_model", "profile_file", "preset_table", ""},
    "__main__": {"cli"},
    "ccl": {"worker"},
    "__init__": {"worker.events", "worker.barrier"},
}
EFFECTFUL = {"os", "subprocess", "socket", "pathlib", "time", "signal", "ctypes", "shutil", "tempfile", "selectors"}
NEVER = {"torch", "subprocess32", "numpy"}


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "profiles" not in path.parts]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def allowed(name: str, layers: set[str]) -> bool:
    inner = name.removeprefix("cpulaunch").removeprefix(".")
    return any(inner == one or inner.startswith(one + ".") for one in layers if one) or (not inner and "" in layers)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards_only(path):
    ours = {name for name in imports(path) if name.split(".")[0] == "cpulaunch"}
    # `from cpulaunch.x import y` is judged by its module; `from cpulaunch import x` by the name.
    ours = {name for name in ours if not any(other != name and name.startswith(other + ".") for other in ours)} | {
        name for name in ours if name.count(".") == 1
    }
    ours.discard("cpulaunch")
    layers = MAY_IMPORT[layer(path)]
    wrong = {name for name in ours if not allowed(name, layers)}
    # A package prefix alone (cpulaunch.plan for `from cpulaunch.plan.notes import …`) is the parent of an allowed name.
    wrong = {name for name in wrong if not any(f"cpulaunch.{one}".startswith(name + ".") for one in layers if one)}
    assert not wrong, f"{layer(path)} may not import {sorted(wrong)}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_worker_and_the_agent_import_torch(path):
    inside = layer(path) == "worker" or path.match("launch/agent*.py")
    forbidden = NEVER - {"torch"} if inside else NEVER
    assert not {name.split(".")[0] for name in imports(path)} & forbidden


@pytest.mark.parametrize("path", sorted((PACKAGE / "plan").rglob("*.py")), ids=lambda path: path.name)
def test_planning_is_pure(path):
    assert not {name.split(".")[0] for name in imports(path)} & EFFECTFUL


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_readable_in_one_sitting(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 400 or path.name == "preset_table.py"


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


def test_a_launch_imports_little():
    """Each of these costs a launch 2 to 20 ms; see record.py."""
    loaded = f"import sys; {HOT_PATH}; print(*(m for m in {HEAVY} if m in sys.modules))"
    out = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {loaded}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.split() == []
