"""What a tuning needs to know before its first launch: the fixed options, their plans, the space, the study."""

from __future__ import annotations

import os

from cpulaunch.measure.program_source import (
    argument_files,
    imported_sources,
    named_variables,
    own_folders,
    read_source,
    source_file,
)
from cpulaunch.measure.tuning.identity import StudyIdentity, content_digest
from cpulaunch.measure.tuning.space import SpaceChoice, candidates, options_of, script_source, search_space
from cpulaunch.profile.provenance import machine_facts, version_facts
from cpulaunch.profile.selection import user_folder
from cpulaunch.records.errors import CpulaunchError, UsageError
from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import RATE_VARIABLE
from cpulaunch.view.hidden_values import PUBLIC
from cpulaunch.view.plan_view import plan_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from typing import Any

    from cpulaunch.cli.measuring.services import Services
    from cpulaunch.cli.measuring.tune_arguments import TuneLine
    from cpulaunch.measure.tuning.space import Configuration
    from cpulaunch.records.command_line import CommandLine
    from cpulaunch.records.host import Host
    from cpulaunch.records.plan import LaunchPlan

NOT_TUNED = frozenset({"--dry-run", "--brief", "--version"})
"""Options with which nothing would be launched."""
OWN_SETTINGS = {"report": "tune writes reports of its own", "html": "tune writes reports of its own"}
"""Settings that the fixed options cannot have, and why."""
DEFAULT_RANKS = "numa"
"""Ranks per host of --dist, if the options do not say."""
STUDIES = "tune"
LIBRARIES = (RATE_VARIABLE, "TORCH_", "HF_", "TRANSFORMERS_", "TOKENIZERS_")
"""Beginnings of names of variables that change what is measured, besides those that are shown."""


@record
class TuneProgram:
    """The program and the options of all launches, parsed. `options`: with those that the goal adds."""

    line: TuneLine
    parsed: CommandLine
    options: tuple[str, ...]
    host: Host
    python: str

    @property
    def is_job(self) -> bool:
        """Whether the launches are jobs of ranks, which plain Python cannot run."""
        return any(name in self.parsed.values for name in ("nproc_per_node", "nnodes", "standalone"))


def tuned_program(line: TuneLine, services: Services, *, python: str) -> TuneProgram:
    """The program with its host. Raises: CpulaunchError if it cannot be launched as things are."""
    ranks = ["--nproc-per-node", DEFAULT_RANKS] if _needs_ranks(line) else []
    options = (*ranks, *line.options, *(["--start-barrier"] if line.goal.throughput else []))
    parsed = services.parse([*options, *line.program])
    if found := parsed.switches & NOT_TUNED:
        raise UsageError(f"tune with {min(found)} starts nothing", hint=f"leave {min(found)} out")
    if parsed.emit is not None or parsed.sysroot is not None:
        named = "--emit" if parsed.emit is not None else "--sysroot"
        raise UsageError(f"tune with {named} starts nothing", hint=f"leave {named} out")
    for name, reason in OWN_SETTINGS.items():
        if name in parsed.values:
            raise UsageError(f"tune takes no --{name}", hint=reason)
    parsed = services.resolve(parsed)
    host, plan = services.host_and_plan(parsed)
    if line.goal.latency and len(plan.workers) > 1:
        what = f"the options start {len(plan.workers)}"
        raise UsageError("--latency and --rate are for one server", value=what, hint="leave out what starts several")
    chosen = parsed.python.path if parsed.python is not None else python
    return TuneProgram(line=line, parsed=parsed, options=options, host=host, python=chosen)


def _needs_ranks(line: TuneLine) -> bool:
    """Whether the launches are to be jobs, and the options do not say how many ranks they have."""
    names = (option.partition("=")[0].replace("_", "-") for option in line.options)
    return line.goal.ranks and "--nproc-per-node" not in names


class Planner:
    """The plans of configurations, each made once."""

    def __init__(self, program: TuneProgram, services: Services) -> None:
        self._program = program
        self._services = services
        self.environ = services.environ
        self._effects: dict[frozenset[tuple[str, object]], Hashable] = {}

    def plan(self, *words: str) -> LaunchPlan:
        """The plan with these words behind the fixed options. Raises: CpulaunchError."""
        parsed = self._services.parse([*self._program.options, *words, *self._program.line.program])
        return self._services.check(self._services.resolve(parsed))

    def effect_of(self, *words: str) -> Hashable:
        """What these words do on this machine, equal for words that do the same; None if there is no plan."""
        try:
            plan = self.plan(*words)
        except CpulaunchError:
            return None
        return (plan.workers, plan.job, plan.launch.binder)

    def effect(self, configuration: Configuration) -> Hashable:
        """What a configuration does on this machine."""
        key = frozenset(configuration.items())
        if key not in self._effects:
            self._effects[key] = self.effect_of(*options_of(configuration))
        return self._effects[key]


def study_identity(program: TuneProgram, planner: Planner) -> StudyIdentity:
    """What the study is about, with the space of its search. Raises: UsageError if there is nothing to tune."""
    line = program.line
    sources = _sources(program, planner.environ)
    data = next(iter(sources.values()), b"")
    is_script = program.parsed.program is not None and program.parsed.program.kind == "script"
    given = program.parsed.values.keys() - ({"nproc_per_node"} if _needs_ranks(line) else set())
    goals = {"--throughput": line.goal.throughput, "--dist": line.goal.ranks}
    choice = SpaceChoice(
        vary=line.vary,
        fixed=line.fixed | given,
        max_error=line.goal.max_error,
        goals=frozenset(name for name, is_given in goals.items() if is_given),
    )
    space = search_space(
        candidates(program.host, throughput=line.goal.throughput, ranks=line.goal.ranks),
        choice,
        source=script_source(data) if is_script else None,
        effect=planner.effect,
    )
    goal = (["--throughput"] if line.goal.throughput else []) + (["--latency"] if line.goal.latency else [])
    options = (*program.options, *goal, *([] if line.goal.rate is None else [str(line.goal.rate)]))
    return StudyIdentity(
        program=line.program,
        content=_content(sources),
        machine=machine_facts(program.host),
        versions=version_facts(program.host),
        options=options,
        metric=line.goal.choice,
        max_error=line.goal.max_error,
        space=space,
        folder=os.path.abspath("."),
        conditions={
            "lower": line.goal.lower,
            "output": None if line.output is None else os.path.abspath(line.output),
            "launch_seconds": line.limits.launch_seconds,
            "python": program.python,
            "default": _default_plan(planner),
            "variables": {
                **{name: text for name, text in planner.environ.items() if name.startswith((*PUBLIC, *LIBRARIES))},
                **named_variables(sources.values(), planner.environ),
            },
        },
    )


def _default_plan(planner: Planner) -> dict[str, Any]:
    """What the default does, as JSON data, profiles and variables of the user included. Raises: CpulaunchError."""
    plan = plan_json(planner.plan())
    return {name: plan[name] for name in ("mode", "world_size", "workers", "job")}


def _sources(program: TuneProgram, environ: Mapping[str, str]) -> dict[str, bytes]:
    """By path the text of the program's script, module or command, first, and of what that depends on.

    That are scripts and configuration files among the arguments, and the program's own modules that these import.
    """
    found = program.parsed.program
    path = None if found is None else source_file(found.kind, found.target, environ)
    if found is None or path is None:
        return {}
    first = (found.target,) if found.kind == "module" else ()
    modules = [*imported_sources(path, own_folders(found.kind, path, environ), first=first)]
    written = None if program.line.output is None else os.path.realpath(program.line.output)
    given = [each for each in argument_files(found.args) if each != written]
    for each in given:
        modules += imported_sources(each, own_folders("script", each, environ))
    return {each: read_source(each) for each in dict.fromkeys((path, *given, *modules))}


def _content(sources: Mapping[str, bytes]) -> str:
    """What stands for the text of a program."""
    (_, text), *modules = sources.items() or [("", b"")]
    parts = [text, *(part for path, data in modules for part in (os.fsencode(path), data))]
    return content_digest(b"\0".join(parts))


def studies_folder(environ: Mapping[str, str]) -> str:
    """The folder of all studies. Raises: CpulaunchError if this user has no home directory."""
    folder = user_folder(environ, "XDG_STATE_HOME", os.path.join(".local", "state"))
    if folder is None:
        raise CpulaunchError("there is no folder for the trials: no home directory", hint="set XDG_STATE_HOME")
    return os.path.join(folder, STUDIES)
