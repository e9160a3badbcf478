"""A plan and a command line without the values that --env gave, which may be passwords and tokens."""

from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.plan import LaunchPlan, Note, WorkerPlan
from cpulaunch.records.record import replace

SHOW = "--show-env"
HIDDEN = "(hidden)"
PUBLIC = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "DNNL_", "ONEDNN_", "ZENDNN_", "ATEN_"),
    *("TORCHINDUCTOR_", "TORCH_MKLDNN_", "MALLOC_", "TCMALLOC_", "MIMALLOC_", "LD_", "LRU_CACHE_", "THP_", "PYTHON"),
    *("GLOO_", "NCCL_", "CCL_", "FI_", "CUDA_", "PYTORCH_"),
)
"""Beginnings of the names of variables that tune a program, whose values are shown: they are no secrets."""


def hidden_names(command_line: CommandLine) -> frozenset[str]:
    """The variables of --env whose values are not shown; none under --show-env."""
    if SHOW in command_line.switches:
        return frozenset()
    given = command_line.values.get("env", ())
    return frozenset(name for name, _ in given if not name.startswith(PUBLIC))


def without_values(plan: LaunchPlan, names: frozenset[str]) -> LaunchPlan:
    """The plan to show, with HIDDEN in place of the values of these variables."""
    if not names:
        return plan
    return replace(
        plan,
        workers=tuple(_worker(worker, names) for worker in plan.workers),
        notes=tuple(_note(note) if note.setting in names else note for note in plan.notes),
    )


def _worker(worker: WorkerPlan, names: frozenset[str]) -> WorkerPlan:
    return replace(worker, env=tuple((name, HIDDEN if name in names else value) for name, value in worker.env))


def _note(note: Note) -> Note:
    return replace(note, value=HIDDEN, reason=f"{note.reason}; {SHOW} shows the value")


def without_variables(command_line: CommandLine, names: frozenset[str]) -> CommandLine:
    """The command line without --env for these variables."""
    kept = tuple((name, value) for name, value in command_line.values.get("env", ()) if name not in names)
    values = {name: value for name, value in command_line.values.items() if name != "env"}
    return replace(command_line, values={**values, **({"env": kept} if kept else {})})
