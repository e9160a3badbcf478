"""Where the time of a process's steps went, as shares. Pure.

Times of loaders and collectives are those of all steps. What is left is divided as the profiler saw it in a few steps.
The time for which the measured thread was ready to run but had no CPU belongs to nothing that the program does: it is
left out of the whole, unless the program's own threads are to blame. So is the time in which an operation waits for
another of the program's threads that has no CPU.
"""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cpulaunch.measure.diagnosis.figures import ProcessFigures

INTERRUPTED = 0.05
"""Share of the profiled time without a CPU, from which on single long times say nothing."""
LEAST_LEFT = 0.3
"""Of the time in tiny operations, what stays when the profiler's own time is taken off."""


@record
class Shares:
    """Parts of the steps' time, which add up to 1.

    `waiting`: outside torch, without using a CPU. `python`: the program's own code between operations. `overhead`:
    calling operations that are not tiny, and autograd. `low_products`: of low precision. `moving`: operations that
    compute little for the bytes they move. `computing`: all other operations, and compiled graphs. `delayed`: ready to
    run, without a CPU; 0 if other programs were to blame. `seconds`: of one step, without the time that others took.
    `others`: the share that other programs took before.
    """

    seconds: float = 0.0
    data: float = 0.0
    collective: float = 0.0
    products: float = 0.0
    low_products: float = 0.0
    moving: float = 0.0
    computing: float = 0.0
    access: float = 0.0
    allocation: float = 0.0
    synchronization: float = 0.0
    tiny: float = 0.0
    overhead: float = 0.0
    python: float = 0.0
    waiting: float = 0.0
    delayed: float = 0.0
    unknown: float = 0.0
    others: float = 0.0

    @property
    def operations(self) -> float:
        """The share of operations that run in several threads."""
        return self.products + self.low_products + self.moving + self.computing


def shares_of(figures: ProcessFigures, *, own_delay: float) -> Shares:
    """The shares of a process.

    `own_delay`: of the time in which a thread runs or waits for a CPU, the share for which its own threads are to blame
    that it waits; other programs are for the rest.
    """
    steps, seconds = max(1, figures.steps), figures.seconds
    delay = min(figures.sum("thread_delay"), 0.99 * seconds)
    cpu = figures.sum("thread_cpu")
    rate = delay / cpu if cpu > 0 else 0.0

    def without_delay(name: str) -> float:
        used = figures.sum(f"{name}_cpu")
        return max(used, figures.sum(f"{name}_seconds") - rate * used)

    data = without_delay("data")
    backward = figures.sum("backward_seconds") - figures.sum("backward_collective_seconds")
    blocked_backward = max(0.0, backward - (1 + rate) * figures.sum("backward_cpu"))
    collective = without_delay("collective") + _hidden_collectives(figures, blocked_backward)
    active = max(1e-9, seconds - delay)
    data, collective = _fitted(data, collective, active)
    held_up = _held_up(figures, active - data - collective)
    delay, active = delay + held_up, max(1e-9, active - held_up)
    rest = active - data - collective
    outside_cpu = max(0.0, cpu - figures.sum("data_cpu") - figures.sum("collective_cpu"))
    blocked = max(0.0, active - outside_cpu - data - collective)
    parts = _divided(figures, rest / steps, blocked / steps)
    own = min(delay, own_delay * min(seconds, cpu + delay))
    whole = (active + own) / steps
    unhooked = parts.pop("collective", 0.0)  # Functional collectives, and those inside compiled graphs.
    per_step = {"data": data / steps, "collective": collective / steps + unhooked, **parts}
    if own_delay:
        per_step["delayed"] = own / steps
    return Shares(
        seconds=whole,
        others=(delay - own) / seconds if seconds else 0.0,
        **{name: value / whole for name, value in per_step.items()},
    )


def _hidden_collectives(figures: ProcessFigures, blocked: float) -> float:
    """Seconds in which backward passes wait for other ranks. `blocked`: for which they used no CPU.

    One thread has nothing else to wait for. Several wait for one another, too: of these counts what the profiler saw
    while other threads ran collectives.
    """
    if figures.world_size <= 1:
        return 0.0
    if figures.threads == 1:
        return blocked
    examined = figures.examined_steps
    waits = 0.0 if figures.window is None or examined <= 0 else float(figures.window.get("backward_waits", 0.0))
    return min(blocked, waits / examined * figures.steps) if waits else 0.0


def _held_up(figures: ProcessFigures, rest: float) -> float:
    """Seconds in which operations wait for other threads of the process that have no CPU, in a busy wait mostly.

    They are what steps take beyond what the profiler saw, in which operations that took too long do not count, and no
    more than the other compute threads waited for a CPU. `rest`: the seconds outside of loaders and collectives.
    """
    if figures.threads < 2 or not interrupted_often(figures) or figures.examined_steps <= 0:
        return 0.0
    waited = max(0.0, figures.sum("process_delay") - figures.sum("thread_delay")) / (figures.threads - 1)
    seen, pauses = _seen(figures)
    return min(waited, max(0.0, rest - (sum(seen.values()) + pauses) * figures.steps))


def _fitted(data: float, collective: float, active: float) -> tuple[float, float]:
    total = data + collective
    scale = min(1.0, active / total) if total > 0 else 1.0
    return data * scale, collective * scale


def _divided(figures: ProcessFigures, rest: float, blocked: float) -> dict[str, float]:
    """The seconds of a step without loaders and collectives, by what they were spent on."""
    if figures.window is None or figures.examined_steps <= 0:
        return {"unknown": rest}
    seen, pauses = _seen(figures)
    excess = sum(seen.values()) + pauses - rest
    if excess > 0 and interrupted_often(figures):  # A pause that other steps do not have was an interruption.
        pauses, excess = max(0.0, pauses - excess), max(0.0, excess - pauses)
    small = ("synchronization", "tiny", "overhead")
    of_small = sum(seen[name] for name in small)
    if excess > 0 and of_small > 0:  # The profiler's own time is spent where there are many events.
        left = max(LEAST_LEFT, 1 - excess / of_small)
        seen |= {name: seen[name] * left for name in small}
    total = sum(seen.values()) + pauses
    waiting = min(pauses, blocked)
    seen |= {"waiting": waiting, "python": pauses - waiting}
    if total <= 0:
        return {"unknown": rest}
    return {name: value * rest / total for name, value in seen.items()}


def _seen(figures: ProcessFigures) -> tuple[dict[str, float], float]:
    """What the profiler saw in a step, in seconds: of operations by kinds, and between them."""
    window, count = figures.window or {}, figures.examined_steps
    kinds, tiny = window["kinds"], window["tiny"]
    interrupted = max(0.0, float(window.get("delay", 0.0)) - float(window["absorbed"]))
    waits = float(window.get("backward_waits", 0.0)) if figures.world_size > 1 else 0.0
    pauses = max(0.0, float(window["pauses"]) - interrupted - waits) / count
    seen = {
        "products": float(kinds.get("products", 0.0)) / count,
        "low_products": float(kinds.get("low products", 0.0)) / count,
        "moving": float(kinds.get("other", 0.0)) / count,
        "computing": float(kinds.get("computing", 0.0)) / count,
        "access": float(kinds.get("access", 0.0)) / count,
        "allocation": float(kinds.get("allocation", 0.0)) / count,
        "collective": float(kinds.get("collective", 0.0)) / count,
        "synchronization": float(tiny["synchronization"] + kinds.get("synchronization", 0.0)) / count,
        "tiny": float(tiny["seconds"]) / count,
        "overhead": float(window["overhead"]) / count,
    }
    return seen, pauses


def interrupted_often(figures: ProcessFigures) -> bool:
    """Whether other threads often took the CPU in the steps that the profiler saw."""
    window = figures.window
    return window is not None and float(window.get("delay", 0.0)) > INTERRUPTED * float(window["seconds"])
