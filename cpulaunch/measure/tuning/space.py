"""The space of a search: the settings that can matter for one program on one machine, and their values."""

from __future__ import annotations

import re
import sys

from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record, replace
from cpulaunch.records.settings import setting_specs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from typing import Any, TypeAlias

    from cpulaunch.records.host import Host

    Configuration: TypeAlias = "Mapping[str, Any]"
    Effect: TypeAlias = "Callable[[Configuration], Hashable]"

UNSET = "-"
"""How a value that is left to cpulaunch is written."""


@record
class Dimension:
    """A setting and its values; None: it is not given. `needs`: a word in a script for which it can matter."""

    name: str
    values: tuple[Any, ...]
    needs: str = ""

    def texts(self) -> tuple[str, ...]:
        """The values as text, in the same order."""
        return tuple(value_text(self.name, value) for value in self.values)


@record
class SpaceChoice:
    """What the user asked of the space. `vary`: name -> values, none: all that can matter; empty: every dimension.

    `max_error`: how far outputs may be from plain Python's; None: settings that change numerics are left out.
    `goals`: the options among --throughput and --dist that are given.
    """

    vary: Mapping[str, tuple[Any, ...]]
    fixed: frozenset[str]
    max_error: float | None = None
    goals: frozenset[str] = frozenset()


ROUNDING, BF16, INT8, INT4 = 1e-6, 1e-3, 3e-3, 1e-2
"""Errors below which a search without them would be in vain."""
ENVIRONMENT = frozenset(
    {
        *("threads", "interop_threads", "wait_policy", "affinity", "openmp", "allocator", "huge_pages", "mkl_dispatch"),
        *("cpus", "numa_nodes", "smt", "e_cores", "reserve", "strategy", "membind", "binder", "oversubscribe"),
        *("instances", "cores_per_instance", "nproc_per_node", "numa_binding", "dist_backend", "ddp_bucket_mb"),
        *("ccl_path", "ccl_workers", "ccl_worker_siblings"),
        *("debug_apis", "mmap_weights", "pin_memory"),
    }
)
"""Settings that compute the same: results differ at most as with another number of threads, or of ranks."""
LEAST_ERROR: Mapping[str, Mapping[Any, float]] = {
    "optimize": {3: BF16, 4: INT8},
    "weights": {"bf16": BF16, "int8": INT8, "int4": INT4},
    "precision": {"bf16": BF16, "fp16": BF16, "medium": BF16, "tf32": BF16},
}
"""By value, the least error that allows settings that change what is computed (docs/inside-torch.md).

ROUNDING allows all others that are not of the environment: other kernels round differently, workers of a DataLoader
draw other random numbers, also if they stay alive between epochs, and inference mode trains no encoder in eval mode.
"""
NEEDED_GOALS = {
    "instances": ("--throughput", "sums the metric over instances that begin together"),
    "cores_per_instance": ("--throughput", "sums the metric over instances that begin together"),
    "nproc_per_node": ("--dist", "launches jobs of ranks"),
}
"""Settings that --vary may name only with another option, and what that one does."""


IMPORT = re.compile(r"(?:^|[;:])[ \t]*(?:from[ \t]+([\w.]+)|import[ \t]+([\w., \t]+))", re.MULTILINE)
CONTINUED = re.compile(r"\\\r?\n")
SELF_CONTAINED = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "cpulaunch"}


def script_source(data: bytes) -> str | None:
    """The text of a script that shows all of its program; None if modules of others may build its model or data."""
    text = data.decode(errors="replace")
    whole_lines = CONTINUED.sub(" ", text)
    names = [name for start, others in IMPORT.findall(whole_lines) for name in (start or others).split(",")]
    modules = {name.split()[0].partition(".")[0] for name in names if name.strip()}
    return text if text and modules <= SELF_CONTAINED else None


def value_text(name: str, value: Any) -> str:
    """A setting's value as text."""
    if value is None:
        return UNSET
    value_type = setting_specs()[name].value_type
    return ("on" if value else "off") if value_type.flag else value_type.to_text(value)


def options_of(configuration: Configuration) -> tuple[str, ...]:
    """The words of a command line that give the settings of a configuration."""
    specs = setting_specs()
    return tuple(word for name, value in configuration.items() for word in specs[name].arguments(value))


def candidates(host: Host, *, throughput: bool = False, ranks: bool = False) -> tuple[Dimension, ...]:
    """Every dimension that this machine has, those with the largest effects first.

    `throughput`: several instances may run at once. `ranks`: the program is a job whose number of ranks may vary.
    """
    bf16 = host.cpu.has_bf16
    cores = len({cpu.core for cpu in host.cpus if cpu.id in host.limits.budget.cpus})
    return (
        Dimension(name="weights", values=(None, "int8", *(["bf16"] if bf16 else []), "fp32", "int4")),
        Dimension(name="graph", values=(None, "onednn")),
        *([Dimension(name="precision", values=(None, "bf16"))] if bf16 else []),
        *(_of_jobs(cores) if ranks else ()),
        *([Dimension(name="instances", values=(None, *_instances(cores)))] if throughput else []),
        Dimension(name="threads", values=(None, *_fractions(min(cores, host.limits.budget.threads)))),
        Dimension(name="channels_last", values=(None, True), needs="onv"),
        Dimension(name="inference_mode", values=(None, True)),
        Dimension(name="fused_optimizers", values=(None, True), needs="optim"),
        Dimension(name="dataloader_workers", values=(None, 1, 2, 4)[: 2 + cores // 4], needs="DataLoader"),
        Dimension(name="persistent_workers", values=(None, True), needs="DataLoader"),
        Dimension(name="allocator", values=(None, "tcmalloc", "jemalloc", "mimalloc", "default")),
        Dimension(name="openmp", values=(None, "intel", "llvm", "default")),
        Dimension(name="wait_policy", values=(None, "active", "passive")),
        Dimension(name="smt", values=(None, True)),
        Dimension(name="affinity", values=(None, "close", "spread")),
        Dimension(name="membind", values=(None, "bind", "interleave") if len(host.numa_nodes) > 1 else (None,)),
        Dimension(name="mkl_dispatch", values=(None, "off")),
        Dimension(name="huge_pages", values=(None, True) if _may_choose_huge_pages(host) else (None,)),
        Dimension(name="flush_denormal", values=(None, True)),
    )


def _fractions(cores: int) -> tuple[int, ...]:
    """Numbers of threads below that of the cores: three quarters, a half and a quarter."""
    return tuple(dict.fromkeys(each for each in (cores // 2, 3 * cores // 4, cores // 4) if 1 <= each < cores))


def _of_jobs(cores: int) -> tuple[Dimension, ...]:
    """What matters for ranks that reduce gradients."""
    return (
        Dimension(name="nproc_per_node", values=(None, 1, *_instances(cores), "numa")),
        Dimension(name="dist_backend", values=(None, "gloo", "ccl")),
        Dimension(name="ddp_bucket_mb", values=(None, 5, 100), needs="DistributedDataParallel"),
    )


def _instances(cores: int) -> tuple[int, ...]:
    """Numbers of instances: powers of two up to one for each core, and that."""
    powers = (1 << exponent for exponent in range(1, cores.bit_length()))
    return tuple(dict.fromkeys((*(each for each in powers if each <= cores), *([cores] if cores > 1 else []))))


def _may_choose_huge_pages(host: Host) -> bool:
    return host.kernel.transparent_hugepage == "madvise"


def search_space(
    dimensions: Iterable[Dimension], choice: SpaceChoice, *, source: str | None, effect: Effect
) -> tuple[Dimension, ...]:
    """The dimensions of the search. Raises: UsageError if nothing is left to vary, or what --vary names may not.

    `source`: the text of the program's script, if it is known. `effect`: what a configuration changes in the plan; None
    if it cannot be planned. Values that change nothing here are left out.
    """
    known = {dimension.name: dimension for dimension in dimensions}
    _check_goals(choice)
    if choice.vary:
        chosen = [_varied(known.get(name), name, values) for name, values in choice.vary.items()]
    else:
        chosen = [each for each in known.values() if source is None or each.needs in source]
    left = [_effective(_allowed(each, choice), effect) for each in chosen if each.name not in choice.fixed]
    space = tuple(each for each in left if len(each.values) > 1)
    if not space:
        hint = "--vary NAME=VALUE,VALUE names settings; --max-error X allows those that change numerics"
        raise UsageError("there is nothing to tune", value=", ".join(choice.vary) or None, hint=hint)
    return space


def _varied(known: Dimension | None, name: str, values: tuple[Any, ...]) -> Dimension:
    if values:
        return Dimension(name=name, values=(None, *values))
    if known is None:
        raise UsageError("--vary needs values for this setting", value=name, hint=f"--vary {name}=VALUE,VALUE")
    return known


def _check_goals(choice: SpaceChoice) -> None:
    """Raises: UsageError if a setting is named that needs another option."""
    for name in choice.vary.keys() & NEEDED_GOALS.keys() - choice.fixed:
        needed, what = NEEDED_GOALS[name]
        if needed not in choice.goals:
            raise UsageError(f"--vary {name} needs {needed}, which {what}", hint=f"add {needed}")


def _allowed(dimension: Dimension, choice: SpaceChoice) -> Dimension:
    """The dimension without values that change numerics further than they may.

    Raises: UsageError if --vary names such a value, or a setting that has no other values.
    """
    allowed = -1.0 if choice.max_error is None else choice.max_error
    least = {value: least_error(dimension.name, value) for value in dimension.values}
    values = tuple(value for value, error in least.items() if error <= allowed)
    if dimension.name in choice.vary:
        refused = [value for value in dimension.values if value not in values]
        all_needed = bool(choice.vary[dimension.name])
        if refused and (all_needed or len(values) == 1):
            found = (max if all_needed else min)(least[value] for value in refused)
            raise UsageError(
                f"--vary {dimension.name} may change what is computed",
                value=", ".join(value_text(dimension.name, value) for value in refused),
                hint=f"allow it with --max-error {found:g}, or more",
            )
    return replace(dimension, values=values)


def least_error(name: str, value: Any) -> float:
    """The least --max-error that allows a value of a setting; below zero if it needs none."""
    if value is None or name in ENVIRONMENT:
        return -1.0
    return LEAST_ERROR.get(name, {}).get(value, ROUNDING)


def _effective(dimension: Dimension, effect: Effect) -> Dimension:
    """The dimension without values that cannot be planned, or change nothing against those before them."""
    seen: dict[Hashable, Any] = {}
    for value in dimension.values:
        found = effect({} if value is None else {dimension.name: value})
        if found is not None:
            seen.setdefault(found, value)
    return replace(dimension, values=tuple(seen.values()))


def within(configuration: Configuration, space: Sequence[Dimension]) -> Configuration | None:
    """The configuration in the space's order; None if the space lacks one of its values."""
    values = {dimension.name: dimension.values for dimension in space}
    if any(value not in values.get(name, ()) for name, value in configuration.items()):
        return None
    return {name: configuration[name] for name in values if configuration.get(name) is not None}


def parse_variation(text: str) -> dict[str, tuple[Any, ...]]:
    """What --vary says: NAME,NAME or NAME=VALUE,VALUE. Raises: UsageError."""
    names, equals, values = text.partition("=")
    if not equals:
        return {_setting_name(name): () for name in names.split(",")}
    name = _setting_name(names)
    return {name: tuple(_parsed(name, value) for value in values.split(","))}


def _setting_name(text: str) -> str:
    name = text.strip().removeprefix("--").replace("-", "_")
    if name not in setting_specs():
        raise UsageError("unknown setting", value=text, source="--vary or --fix", hint="cpulaunch --help all")
    return name


def parse_fixed(text: str) -> frozenset[str]:
    """What --fix says: NAME,NAME. Raises: UsageError."""
    return frozenset(_setting_name(name) for name in text.split(","))


def _parsed(name: str, text: str) -> Any:
    value_type = setting_specs()[name].value_type
    if value_type.flag:
        switched = {"on": True, "true": True, "off": False, "false": False}.get(text)
        if switched is None:
            raise UsageError(f"invalid value {text!r} for --vary {name}", hint=f"--vary {name}=on,off")
        return switched
    try:
        return value_type.from_text(text)
    except ValueError as error:
        raise UsageError(f"invalid value {text!r} for --vary {name}", value=error) from None
