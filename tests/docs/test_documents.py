"""README and docs/ say what is so: links lead somewhere, commands are accepted, outputs and JSON fields are real."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.cli.main import run_command_line
from tests.docs import pages
from tests.docs.pages import CAPTURED, PAGES, REPOSITORY
from tests.plan.gpus.machines import DGX_H100
from tests.roots import write_root

REFERENCE = (REPOSITORY / "docs/reference.md").read_text()
REFRESH = "`python -m tests.docs.pages` writes what is so now"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def run(folder: Path) -> Callable[[str], str]:
    """Runs a shell command in a folder with a captured machine."""
    return pages.runner(folder)


@pytest.fixture
def cpulaunch(
    folder: Path, run: object, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Gives stdout of a command line in that folder and without this test's environment.

    It must succeed, unless it asks for a library that the captured machine does not have.
    """
    monkeypatch.chdir(folder)
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))

    def call(*words: str) -> str:
        code = run_command_line(words)
        said = capfd.readouterr()
        assert code == 0 or "is not installed" in said.err, f"{' '.join(words)}\n{said.err}"
        return said.out

    return call


@pytest.mark.parametrize("page", [*PAGES, *REPOSITORY.glob("C*.md")], ids=lambda page: page.name)
def test_no_line_is_longer_than_120_characters(page: Path) -> None:
    assert [number for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) > 120] == []


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in pages.links(page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in pages.anchors(target.read_text()), link


@each_page
def test_every_command_is_accepted(page: Path, cpulaunch: Callable[..., str], folder: Path) -> None:
    text = page.read_text()
    toml = [block for language, block in pages.FENCE.findall(text) if language == "toml"]
    (folder / "my.toml").write_text("".join(toml))
    for words in pages.shown_commands(text):
        cpulaunch(*without_effect(words))


def without_effect(words: list[str]) -> list[str]:
    """A command line as it is shown -> one that starts nothing, and plans for the captured machine."""
    name, *rest = words
    if "--from-mpi" in rest:  # mpirun did not start this process
        rest = [part for word in rest for part in ((word, "--scheduler=none") if word == "--from-mpi" else (word,))]
    first = rest[0] if rest else ""
    captured = [] if "--sysroot" in rest else ["--sysroot", CAPTURED]
    if first in ("profiles", "--help", "--version", ""):
        return rest
    if first in ("probe", "doctor"):
        return [*rest, *captured]
    if name == "torchrun" or first == "torchrun":
        return ["torchrun", "--dry-run", *captured, *(rest if name == "torchrun" else rest[1:])]
    return ["plan", *captured, *(rest[1:] if first in ("run", "plan") else rest)]


def test_the_pages_show_commands() -> None:
    shown = [words for page in PAGES for words in pages.shown_commands(page.read_text())]
    assert len(shown) > 40


@each_page
def test_quoted_outputs_are_real(page: Path, run: Callable[[str], str]) -> None:
    text = page.read_text()
    assert pages.refreshed(text, run) == text, REFRESH


def test_the_readme_quotes_outputs() -> None:
    assert pages.refreshed(PAGES[0].read_text(), lambda command: "") != PAGES[0].read_text()


def test_the_picture_is_what_cpulaunch_draws(folder: Path, run: Callable[[str], str]) -> None:
    assert pages.map_svg(folder, run) == pages.MAP.read_text(), REFRESH


def section(heading: str) -> str:
    """The part of the reference under a heading, without its subsections' siblings."""
    level = heading.partition(" ")[0]
    return REFERENCE.split(f"\n{heading}\n")[1].split(f"\n{level} ")[0]


def test_the_reference_names_every_option(cpulaunch: Callable[..., str]) -> None:
    offered = set(re.findall(r"^  (--[a-z-]+)", cpulaunch("--help", "all"), re.MULTILINE))
    named = set(re.findall(r"`(--[a-z-]+)`", section("## Options"))) - {"--no-smt"}
    assert offered == named - {f"--no-{name[2:]}" for name in offered - {"--python"}}


PLANS = (
    ["--wait-policy", "active", "--affinity", "close", "--huge-pages"],
    ["--wait-policy", "passive", "--affinity", "explicit", "--instances", "2"],
    *(["--profile", name] for name in ("latency", "throughput", "training", "graviton3", "container", "gpu-node")),
    ["--nproc-per-node", "2", "--dist-backend", "ccl"],
    ["--nproc-per-node", "2", "--ccl-workers", "1"],
    ["--nnodes", "2", "--node-rank", "0", "--master-addr", "node0", "--nproc-per-node", "2"],
    ["--nproc-per-node", "gpu", "--virtual-local-rank"],
)


@pytest.mark.parametrize("options", PLANS, ids=" ".join)
def test_the_reference_names_every_variable(options: list[str], cpulaunch: Callable[..., str], gpus: str) -> None:
    root = gpus if "gpu" in options else CAPTURED
    plan = json.loads(cpulaunch("plan", "--sysroot", root, "--json", *options, "train.py"))
    named = set(re.findall(r"\b[A-Z][A-Z0-9_]{3,}\b", section("## Environment variables")))
    assert {name for worker in plan["workers"] for name in worker["env"]} <= named


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The root of a machine with eight GPUs."""
    return str(write_root(tmp_path_factory.mktemp("gpus"), DGX_H100))


def test_the_reference_has_the_fields_of_probe(cpulaunch: Callable[..., str], gpus: str) -> None:
    machines = ([], ["--sysroot", gpus])
    check_fields("### `cpulaunch probe --json`", [json.loads(cpulaunch("probe", "--json", *line)) for line in machines])


def test_the_reference_has_the_fields_of_plan(cpulaunch: Callable[..., str]) -> None:
    lines = (["--instances", "40", "--oversubscribe"], ["--nproc-per-node", "2"])
    plans = [json.loads(cpulaunch("plan", "--sysroot", CAPTURED, "--json", *line, "train.py")) for line in lines]
    check_fields("### `cpulaunch plan --json`", plans)


def test_the_reference_has_the_fields_of_doctor(cpulaunch: Callable[..., str]) -> None:
    check_fields("### `cpulaunch doctor --json`", [json.loads(cpulaunch("doctor", "--json", "--sysroot", CAPTURED))])


PROGRAM = """import torch, cpulaunch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
with torch.no_grad():
    for _ in range(4):
        model(torch.ones(4, 64))
cpulaunch.metric("samples/s", 1.5)
"""


@pytest.mark.torch
def test_the_reference_has_the_fields_of_a_report(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(PROGRAM)
    launches = (["--graph", "onednn", "program.py"], ["--nproc-per-node", "1", "--no-python", "true"])
    check_fields("### `--report FILE.json`", [reported(line, tmp_path) for line in launches])


def reported(line: list[str], folder: Path) -> Any:
    """The report of a launch with these words."""
    command = [sys.executable, "-m", "cpulaunch", "--report", "r.json", *line]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / "r.json").read_text())


def check_fields(heading: str, objects: Iterable[Any]) -> None:
    """Fails unless the table under the heading names the fields of these objects, and no others.

    A field under one that is null or empty in all of them may be there.
    """
    rows = re.findall(r"^\| (`.+?`) \|", section(heading), re.MULTILINE)
    named = {field for cell in rows for field in re.findall(r"`([^`]+)`", cell)} | {"schema"}
    fields = {field for each in objects for field in leaves(each, "", named)}
    empty = {field.removesuffix("?") for field in fields if field.endswith("?")}
    filled = {field for field in fields if not field.endswith("?")}
    assert filled - named == set()
    assert {each for each in empty - named if not any(name.startswith(each) for name in named)} == set()
    assert {name for name in named - filled if not any(name.startswith(each) for each in empty)} == set()


def leaves(value: Any, path: str, named: set[str]) -> Iterator[str]:
    """The paths of an object's values, with `[]` for lists and `*` for keys that vary; `?` after what is empty."""
    if f"{path}.*" in named and value is not None:
        yield f"{path}.*"
    elif isinstance(value, dict) and value:
        varies = any(name.startswith(f"{path}.*") for name in named)
        for key, inner in value.items():
            step = "*" if varies else key
            yield from leaves(inner, f"{path}.{step}" if path else step, named)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from leaves(inner, f"{path}[]", named)
    else:
        yield f"{path}?" if value is None or value == [] or value == {} else path
