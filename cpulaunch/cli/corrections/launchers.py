"""What the options of one launcher mean together, where that differs from the sum of what each means.

Sources: torch/backends/xeon/run_cpu.py of torch 2.13; intel_extension_for_pytorch/cpu/launch of IPEX 2.8; numactl(8);
taskset(1); mpirun(1) of Open MPI, MPICH and Intel MPI; accelerate launch 1.x; deepspeed 0.18.
"""

from __future__ import annotations

from cpulaunch.cli.corrections.foreign_options import BINDING, EACH_HOST, INSTANCES, RANKS, WORDS, Equivalent
from cpulaunch.records.errors import UsageError
from cpulaunch.records.record import record, replace
from cpulaunch.records.value_types import MAX_DIGITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BINDERS = ("numactl", "taskset")
"""Launchers whose program is any command; the others start Python scripts, and MPI either."""
MPI = ("mpirun", "mpiexec", "mpiexec.hydra")

_PER_HOST = Equivalent(1, "--nproc-per-node {value}")
_VARIABLE = Equivalent(2, "--env {value}")
_MPI_TABLE = {
    **{name: _PER_HOST for name in ("-n", "-np", "--np", "-c", "-N", "--ppn", "--perhost", "--npernode")},
    **{name: _VARIABLE for name in ("-genv", "--genv", "-env", "--env")},
    "-x": RANKS["-x"],
    "-H": RANKS["--host"],
    "--hosts": RANKS["--host"],
    "--machinefile": RANKS["--hostfile"],
    "-f": RANKS["--hostfile"],
    "--mca": Equivalent(2, "", "it concerns Open MPI only"),
    "-l": Equivalent(0, "", "lines of ranks have their number in front"),
}
TABLES: Mapping[str, Mapping[str, Equivalent]] = {
    "numactl": {**BINDING, **{name: Equivalent(1, None) for name in ("-m", "--membind", "-w")}},
    "taskset": {
        "-c": Equivalent(0, ""),
        "--cpu-list": Equivalent(0, ""),
        "-a": Equivalent(0, ""),
        "--all-tasks": Equivalent(0, ""),
    },
    **{name: {**RANKS, **_MPI_TABLE} for name in MPI},
    "run_cpu": {**INSTANCES, "--rank": Equivalent(1, "--instance-index {value}")},
    "ipexrun": {**INSTANCES, "--hostfile": RANKS["--hostfile"]},
    "accelerate": {**RANKS, "--num-workers": WORDS["--num-workers"]},
    "deepspeed": {**RANKS, "-H": RANKS["--hostfile"]},
    "torchrun": {},
}
"""Launcher -> its options that cpulaunch calls otherwise. A short option means something else in each."""

_COMPLETED = {
    "run_cpu": (
        *("--multi-instance", "--module", "--no-python", "--enable-tcmalloc", "--enable-jemalloc", "--disable-iomp"),
        *("--use-default-allocator", "--ncores-per-instance", "--ninstances", "--skip-cross-node-cores", "--rank"),
        *("--latency-mode", "--throughput-mode", "--node-id", "--use-logical-core", "--disable-numactl"),
        *("--disable-taskset", "--core-list", "--log-path", "--log-file-prefix"),
    ),
    "ipexrun": (
        *("--module", "--no-python", "--log-dir", "--log-file-prefix", "--ncores-per-instance", "--nodes-list"),
        *("--use-e-cores", "--strategy", "--memory-allocator", "--omp-runtime", "--ninstances", "--instance-idx"),
        *("--use-logical-cores", "--bind-numa-node", "--multi-task-manager", "--latency-mode", "--throughput-mode"),
        *("--cores-list", "--benchmark", "--nnodes", "--nprocs-per-node", "--ccl-worker-count", "--master-addr"),
        *("--logical-cores-for-ccl", "--master-port", "--hostfile", "--extra-mpi-params", "--auto-ipex", "--dtype"),
        *("--auto-ipex-verbose", "--disable-ipex-graph-mode", "--skip-cross-node-cores"),
    ),
    "numactl": (
        *("--all", "--balancing", "--interleave", "--weighted-interleave", "--preferred", "--preferred-many"),
        *("--membind", "--cpunodebind", "--cpubind", "--physcpubind", "--localalloc", "--hardware", "--show"),
    ),
}
"""Launcher -> all its long options, which it accepts abbreviated."""


@record(kw_only=False)
class Given:
    """An option as typed, with its value; its name with dashes; its value, empty if it has none."""

    typed: str
    name: str
    value: str = ""


@record(kw_only=False)
class Reading:
    """What a launcher's options mean: those to translate one by one, options of cpulaunch for the others, and notes."""

    given: tuple[Given, ...]
    notes: tuple[str, ...] = ()
    options: tuple[tuple[str, ...], ...] = ()


def full_name(tool: str, name: str) -> str:
    """The launcher's option that a name, with dashes, is or abbreviates. Raises: UsageError if it fits several."""
    known = _COMPLETED.get(tool, ())
    if tool in MPI and len(name) > 2 and name[1] != "-" and name not in TABLES[tool]:
        return f"-{name}"  # MPI's long options may have one dash.
    if not name.startswith("--") or name in known or name in TABLES[tool]:
        return name
    matches = [each for each in known if each.startswith(name)]
    if len(matches) > 1:
        raise UsageError("ambiguous option", value=name, source=tool, hint=f"it may mean {', '.join(matches)}")
    return matches[0] if matches else name


def meaning(tool: str, given: Sequence[Given]) -> Reading:
    """What the options of the launcher mean together. Raises: UsageError for what cpulaunch cannot do."""
    rule = _RULES.get(tool)
    return Reading(tuple(given)) if rule is None else rule(tuple(given))


def _named(given: Sequence[Given], *names: str) -> list[Given]:
    return [each for each in given if each.name in names]


def _without(given: Sequence[Given], *names: str) -> tuple[Given, ...]:
    return tuple(each for each in given if each.name not in names)


# run_cpu and ipexrun

_NOTHING = {
    "--rank": ("-1",),
    "--node-id": ("-1",),
    "--instance-idx": ("-1", ""),
    "--ninstances": ("-1", "0"),
    "--ncores-per-instance": ("-1", "0"),
    "--nodes-list": ("",),
    "--cores-list": ("",),
    "--core-list": ("",),
    "--nnodes": ("0",),
    "--nprocs-per-node": ("0",),
    "--log-dir": ("",),
    "--log-path": ("",),
}
"""Option -> values by which it means nothing."""
_MODES = ("--latency-mode", "--throughput-mode")
_OVERRIDDEN = ("--ninstances", "--ncores-per-instance", "--use-logical-cores", "--use-logical-core", "--multi-instance")
_GENERAL = ("--multi-instance", "--distributed", "--auto-ipex", "--benchmark")
"""Options that a more precise one, wherever it stands, takes the place of; it comes behind them here."""


def _run_cpu(given: tuple[Given, ...]) -> Reading:
    reading = _instances(given)
    if not _named(reading.given, *_MODES):
        return reading
    return _overridden(reading, "--node-id")


def _ipexrun(given: tuple[Given, ...]) -> Reading:
    reading = _instances(given)
    hosts = _named(reading.given, "--nnodes", "--distributed")
    if hosts and not _named(reading.given, "--nprocs-per-node", "--nproc-per-node"):
        reading = replace(reading, options=(("--nproc-per-node", "numa"),))
    if any(each.value not in ("", "1") for each in hosts) and not _named(given, "--hostfile"):
        reading = replace(reading, notes=(*reading.notes, f"{hosts[0].typed}: {EACH_HOST}"))
    if _named(reading.given, "--dtype") and not _named(reading.given, "--auto-ipex"):
        notes = (f"{each.typed}: ipexrun reads it with --auto-ipex only" for each in _named(given, "--dtype"))
        reading = replace(reading, given=_without(reading.given, "--dtype"), notes=(*reading.notes, *notes))
    return reading


def _instances(given: Sequence[Given]) -> Reading:
    given = tuple(each for each in given if each.value not in _NOTHING.get(each.name, ()))
    if _named(given, "--ninstances", "--ncores-per-instance"):
        given = _without(given, "--multi-instance")
    ordered = (*_named(given, *_GENERAL), *_without(given, *_GENERAL))
    return _overridden(Reading(ordered), *_OVERRIDDEN) if _named(given, *_MODES) else Reading(ordered)


def _overridden(reading: Reading, *names: str) -> Reading:
    """The reading without these options, which a mode switches off."""
    mode = _named(reading.given, *_MODES)[0].typed
    notes = (f"{each.typed}: has no effect with {mode}" for each in _named(reading.given, *names))
    return replace(reading, given=_without(reading.given, *names), notes=(*reading.notes, *notes))


# numactl and taskset

_CPU_NODES = ("-N", "--cpunodebind", "--cpubind", "-c")
_CPUS = ("-C", "--physcpubind")
_MEMORY = {
    "-m": "bind",
    "--membind": "bind",
    "-p": "preferred",
    "-P": "preferred",
    "--preferred": "preferred",
    "--preferred-many": "preferred",
    "-i": "interleave",
    "--interleave": "interleave",
    "-w": "interleave",
    "--weighted-interleave": "interleave",
}


_WEIGHTED = ("-w", "--weighted-interleave")


def _numactl(given: tuple[Given, ...]) -> Reading:
    """CPUs decide where a worker runs. Memory is that of their NUMA nodes, which may not be what numactl was told."""
    nodes, cpus, memory = (_lists(given, *names) for names in (_CPU_NODES, _CPUS, tuple(_MEMORY)))
    options = [("--cpus", each.value) for each in cpus] + [("--numa-nodes", each.value) for each in nodes]
    notes = []
    for each in memory:
        policy = _MEMORY[each.name]
        notes += [f"{each.typed}: all NUMA nodes have the same weight"] if each.name in _WEIGHTED else []
        places = ", ".join(place.typed for place in (*cpus, *nodes))
        if places and (cpus or nodes[0].value != each.value):
            notes.append(f"{each.typed}: --membind {policy} refers to the NUMA nodes of {places}, not to {each.value}")
        if not places and each.value != "all":
            options.append(("--numa-nodes", each.value))
            notes.append(f"{each.typed}: the CPUs are those of NUMA nodes {each.value} too")
        options += [("--membind", policy)] if policy != "preferred" else []
    return Reading(_without(given, *_CPU_NODES, *_CPUS, *_MEMORY), tuple(notes), tuple(options))


def _lists(given: Sequence[Given], *names: str) -> list[Given]:
    """The last of these options, if its list restricts anything. Raises: UsageError for lists that are not numbers."""
    found = _named(given, *names)[-1:]
    for each in found:
        if each.value != "all" and (not each.value[:1].isdigit() or each.value.strip("0123456789,-")):
            hint = "give the numbers, which cpulaunch probe shows"
            raise UsageError("numactl list without counterpart", value=each.typed, hint=hint)
    return [each for each in found if each.value != "all" or _MEMORY.get(each.name) == "interleave"]


# Launchers of ranks

_TOTAL, _PER = ("-n", "-np", "--np", "-c"), ("-N", "--ppn", "--perhost", "--npernode")


def _mpi(given: tuple[Given, ...]) -> Reading:
    """With a number for each host, the total only says how many hosts there are."""
    totals, per_host = _named(given, *_TOTAL), _named(given, *_PER)
    if not totals or not per_host:
        notes = [f"{each.typed} is the number on all hosts together" for each in totals if _has_hosts(given)]
        return Reading(given, tuple(notes))
    notes = [f"{each.typed}: {EACH_HOST}" for each in totals if each.value != per_host[-1].value]
    return Reading(_without(given, *_TOTAL), tuple(notes))


def _has_hosts(given: Sequence[Given]) -> bool:
    return bool(_named(given, "-H", "--host", "--hosts", "-f", "--hostfile", "--machinefile"))


def _is_count(text: str) -> bool:
    """Whether the text is a whole number that int() takes."""
    return text.isdecimal() and len(text) <= MAX_DIGITS


def _accelerate(given: tuple[Given, ...]) -> Reading:
    """--num_processes is the number on all machines together."""
    processes, machines = _named(given, "--num-processes"), _named(given, "--num-machines")
    if not processes or not machines or machines[-1].value in ("", "1"):
        return Reading(given)
    total, hosts = (each[-1].value for each in (processes, machines))
    if not (_is_count(total) and _is_count(hosts)) or int(hosts) < 1 or int(total) % int(hosts):
        value = f"{processes[-1].typed} {machines[-1].typed}"
        hint = "--nproc-per-node is the number on each"
        raise UsageError("the processes cannot be divided among the machines", value=value, hint=hint)
    count = ("--nproc-per-node", str(int(total) // int(hosts)))
    return Reading(_without(given, "--num-processes"), options=(count,))


def _deepspeed(given: tuple[Given, ...]) -> Reading:
    """Without a number there is a rank for each accelerator; that of CPUs is a NUMA node."""
    several = [each for each in _named(given, "--num-nodes") if each.value != "1"]
    notes = tuple(f"{each.typed}: {EACH_HOST}" for each in several if not _has_hosts(given))
    if _named(given, "--num-gpus", "--num-accelerators"):
        return Reading(given, notes)
    return Reading(
        given, (*notes, "deepspeed starts a rank for each NUMA node, or GPU"), (("--nproc-per-node", "numa"),)
    )


_RULES: Mapping[str, Callable[[tuple[Given, ...]], Reading]] = {
    "run_cpu": _run_cpu,
    "ipexrun": _ipexrun,
    "numactl": _numactl,
    **{name: _mpi for name in MPI},
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}
