"""README and docs/ say what is so: links lead somewhere, commands are accepted, outputs and JSON fields are real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from cpulaunch.cli.arguments import canonical, value_count
from cpulaunch.cli.main import run_command_line
from cpulaunch.cli.measuring.compare_arguments import parse_compare
from cpulaunch.cli.measuring.diagnose_arguments import parse_diagnose
from cpulaunch.cli.measuring.tune_arguments import parse_tune
from cpulaunch.doctor import findings
from cpulaunch.profile.model import CONDITIONS, PROFILE_KINDS
from cpulaunch.records import host, plan, settings
from cpulaunch.records.record import fields
from cpulaunch.records.value_types import literal_words
from tests import json_output
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
    if first == "completion":
        return [first, *(shell.partition("|")[0] for shell in rest[1:])]
    is_in_a_sentence = first in ("translate", "check", "compare", "tune", "diagnose") and set(rest[1:]) <= {
        *("--json", "--compare")
    }
    if is_in_a_sentence or first == "calibrate":
        return [first, "--help"]
    if first in ("translate", "profiles", "check", "--help", "--version", ""):
        return rest
    if first in ("probe", "doctor"):
        return [*rest, *captured]
    if first == "diagnose":
        return ["plan", *captured, *parse_diagnose(rest[1:]).launch]
    if first == "tune":
        tuned = parse_tune(rest[1:], lambda name: value_count(canonical(name)))
        return ["plan", *captured, *tuned.options, *tuned.program]
    if first == "compare":
        line = parse_compare(rest[1:])
        return ["plan", *captured, *(line.sides[-1] or ()), *line.program]
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
    planned = json_output.read("plan", cpulaunch("plan", "--sysroot", root, "--json", *options, "train.py"))
    named = set(re.findall(r"\b[A-Z][A-Z0-9_]{3,}\b", section("## Environment variables")))
    assert {name for worker in planned["workers"] for name in worker["env"]} <= named


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The root of a machine with eight GPUs."""
    return str(write_root(tmp_path_factory.mktemp("gpus"), DGX_H100))


SAMPLES = {
    "probe": [["probe"], ["probe", "--sysroot", "GPUS"], ["probe", "--sysroot", CAPTURED]],
    "plan": [
        ["plan", "--sysroot", CAPTURED, "--instances", "40", "--oversubscribe", "train.py"],
        ["plan", "--sysroot", CAPTURED, "--nproc-per-node", "2", "train.py"],
        ["plan", "--sysroot", "GPUS", "--nproc-per-node", "gpu", "train.py"],
        ["plan"],
    ],
    "doctor": [["doctor", "--sysroot", CAPTURED]],
    "profiles-list": [["profiles", "list"]],
    "profiles-show": [["profiles", "show", name] for name in ("hybrid-desktop", "xeon-amx")],
}


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, lines in SAMPLES.items() for words in lines])
def test_outputs_obey_their_schemas(name: str, words: list[str], cpulaunch: Callable[..., str], gpus: str) -> None:
    json_output.read(name, cpulaunch("--json", *(gpus if word == "GPUS" else word for word in words)))


def described(node: Any) -> Iterator[Any]:
    """Every part of a schema that is about a named field."""
    for inner in node.get("properties", {}).values():
        yield inner
        yield from described(inner)
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from described(node[key])


@pytest.mark.parametrize("name", json_output.names())
def test_schemas_are_valid_and_describe_every_field(name: str) -> None:
    schema = json_output.schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:cpulaunch:schema:1:{name}"
    assert [inner for inner in described(schema) if not inner.get("description")] == []
    assert f"<!-- schemas/{name}.json -->" in (REPOSITORY / "docs/json.md").read_text()


@pytest.mark.parametrize(
    ("name", "field", "words"),
    [
        ("plan", "mode", literal_words(plan.Mode)),
        ("plan", "workers/mempolicy", literal_words(settings.MemoryPolicy)),
        ("probe", "cpus/kind", (*literal_words(host.CoreKind), None)),
        ("probe", "caches/type", literal_words(host.CacheType)),
        ("probe", "kernel/mempolicy", literal_words(host.Permission)),
        ("probe", "libraries/kind", literal_words(host.LibraryKind)),
        ("doctor", "checks/status", get_args(findings.Status)),
        ("profiles-show", "kind", PROFILE_KINDS),
    ],
)
def test_schemas_know_every_word(name: str, field: str, words: tuple[str | None, ...]) -> None:
    node = json_output.schema(name)
    for step in field.split("/"):
        node = node.get("items", node)["properties"][step]
    assert set(node["enum"]) == set(words)


def test_schemas_know_every_condition_and_every_field_of_a_job() -> None:
    applies = json_output.schema("profiles-show")["properties"]["applies"]
    assert set(applies["items"]["properties"]) == set(CONDITIONS)
    job = json_output.schema("plan")["properties"]["job"]
    assert set(job["required"]) == {"member" if name == "scheduled_rank" else name for name in fields(plan.JobPlan)}


PROGRAM = """import torch, cpulaunch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
with torch.no_grad():
    for _ in range(4):
        model(torch.ones(4, 64))
cpulaunch.metric("samples/s", 1.5)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    "line", [["--graph", "onednn", "program.py"], ["--nproc-per-node", "1", "--no-python", "true"]]
)
def test_reports_obey_their_schema(line: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "cpulaunch", "--report", "r.json", *line]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    json_output.read("report", (tmp_path / "r.json").read_text())
