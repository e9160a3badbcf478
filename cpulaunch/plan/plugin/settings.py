"""The settings that travel to the plugin inside each worker's torch, and what they imply: notes, compile caches."""

from __future__ import annotations

from cpulaunch.plan.placement.loaders import Loaders
from cpulaunch.plan.placement.memory import memory_budget
from cpulaunch.plan.plugin.checks import TorchChoices, on_one_host
from cpulaunch.plan.variables.preloads import Preloads
from cpulaunch.plan.variables.resolve import per_worker
from cpulaunch.records.cpulist import format_cpulist
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host, size_text
from cpulaunch.records.plan import Note, VariableRequest, WorkerPlan
from cpulaunch.records.record import fields
from cpulaunch.records.request import LaunchRequest
from cpulaunch.records.torch_settings import INSTANCE_VARIABLES, OWN_VARIABLES, VARIABLE, TorchSettings, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

WEIGHTS_PART, RELEASED_PART = 4, 2
"""Copies of weights may fill one part in this many of a worker's memory: besides the weights, or instead of them."""
FIRST_WITH_THREADS_IN_KEY = (2, 13)
"""The first torch whose compile cache has the thread count in its keys. Source: pytorch PRs 185049 and 185312."""


def check_reserved_variables(request: LaunchRequest) -> None:
    """Raises: UsageError if --env sets a variable with which cpulaunch configures its workers."""
    for name, _ in request.settings.env:
        if name in (*OWN_VARIABLES, *INSTANCE_VARIABLES):
            raise UsageError(f"cpulaunch itself sets {name}", source="--env", hint="use the options instead")


def torch_settings(
    host: Host,
    request: LaunchRequest,
    *,
    workers: Sequence[WorkerPlan],
    choices: TorchChoices,
    loaders: Loaders,
    preloads: Preloads,
) -> tuple[TorchSettings, ...]:
    """The settings for the plugin of each worker, in the order of the workers."""
    common = dict(choices.values)
    common["dataloader_workers"] = loaders.dataloader_workers
    common["graph_memory_bytes"] = weight_memory_bytes(host, choices, len(workers))
    common["loopback_store"] = on_one_host(request)
    common["level_precision"] = request.is_by_level("precision")
    if preloads.ld_preload is not None:
        common |= {"restore_preload": True, "ld_preload": _users_preload(request)}
    return tuple(
        TorchSettings(
            index=index,
            threads=worker.threads,
            compile_cache=_compile_cache(host, worker.threads),
            cpus=format_cpulist(worker.cpus),
            loader_cpus=format_cpulist(worker.loader_cpus),
            strict=request.settings.strict,
            **common,
        )
        for index, worker in enumerate(workers)
    )


def _users_preload(request: LaunchRequest) -> str | None:
    """The value of LD_PRELOAD without this launch; None if it is not set."""
    return dict(request.settings.env).get("LD_PRELOAD", request.environ.get("LD_PRELOAD"))


def weight_memory_bytes(host: Host, choices: TorchChoices, workers: int) -> int | None:
    """Bytes of weights that one worker may hold twice; None without copies, or if the memory size is unknown."""
    budget = memory_budget(host)
    if budget is None or not _copies(choices):
        return None
    return budget // (_part(choices) * workers)


def _copies(choices: TorchChoices) -> list[str]:
    """The copies of weights that the settings make, in words."""
    values = choices.values
    copies = {
        "frozen in captured graphs": values["graph"] != "off",
        "kept by --weights": values["weights"] is not None,
        "kept in bf16 by --precision": values["weights"] is None and values["precision"] == "bf16",
    }
    return [words for words, made in copies.items() if made]


def _part(choices: TorchChoices) -> int:
    return RELEASED_PART if choices.values["release_weights"] else WEIGHTS_PART


def plugin_variables(request: LaunchRequest, settings: Sequence[TorchSettings]) -> tuple[VariableRequest, ...]:
    """The variable that carries the settings to the workers; the variables of an outer launch are unset."""
    names = ", ".join(_setting_names(settings[0]))
    variable = per_worker(
        VARIABLE,
        [encode(each) for each in settings],
        origin="default",
        reason=f"settings for the plugin inside torch: {names} (--json shows all of it)",
        shown="{…}",
    )
    outer = [name for name in OWN_VARIABLES if name != VARIABLE and name in request.environ]
    unset = [
        VariableRequest(name=name, value=None, origin="default", reason="removed: another launch set it")
        for name in outer
    ]
    return (variable, *unset)


def _setting_names(settings: TorchSettings) -> list[str]:
    """The names of the settings that differ from their defaults, for a note."""
    hidden = ("index", "ld_preload", "level_precision", "restore_preload")
    names = [
        name
        for name, entry in fields(TorchSettings).items()
        if name not in hidden and getattr(settings, name) != entry.default
    ]
    return names + (["LD_PRELOAD of its children"] if settings.restore_preload else [])


def weight_memory_notes(host: Host, choices: TorchChoices, workers: int) -> tuple[Note, ...]:
    """The note on the memory that copies of weights may take; none without graphs and --weights."""
    limit = weight_memory_bytes(host, choices, workers)
    if limit is None:
        return ()
    which = " or ".join(_copies(choices))
    share = "half" if choices.values["release_weights"] else "a quarter"
    reason = f"limit for copies of weights in each worker ({which}): {share} of its share of memory"
    return (Note(setting="graph_memory", value=size_text(limit), origin="default", reason=reason),)


def _compile_cache(host: Host, threads: int) -> str | None:
    """The folder of a thread count in the cache of compiled code, for a torch whose keys leave it out; else None.

    Source: torch/_inductor/runtime/cache_dir_utils.py; pytorch issues 167459 and 167463.
    """
    version = host.torch_release
    if version is None or version >= FIRST_WITH_THREADS_IN_KEY:
        return None
    return f"threads-{threads}"
