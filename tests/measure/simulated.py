"""Sides that launch nothing, and a clock that they turn."""

from cpulaunch.measure.comparison import Comparer, ComparisonLimits
from cpulaunch.measure.samples import Disturbance, Sample, Side

SEED = 10
"""Rounds run A B, B A, A B, A B, A B, B A, ..."""
A, B, C = (Side(label=label) for label in "ABC")


class Machine:
    """`results`: label -> a function from the number of the side's launch (0 is the first, which does not count) to
    its value, or to a failure as a text, or raises."""

    def __init__(self, results, *, seconds=10.0, disturbance=None):
        self.results = results
        self.seconds = seconds
        self.disturbance = disturbance or Disturbance()
        self.now = 0.0
        self.launched = []
        self.limits = []

    def take(self, side, choice, limit_seconds):
        number = self.launched.count(side.label)
        self.launched.append(side.label)
        self.limits.append(limit_seconds)
        self.now += self.seconds
        found = self.results[side.label](number)
        failure = found if isinstance(found, str) else None
        return Sample(
            value=None if failure else found,
            seconds=self.seconds,
            metrics={} if failure else {"items/s": found},
            failure=failure,
            exit_code=3 if failure else 0,
            disturbance=self.disturbance,
        )

    def compare(self, *sides, choice=None, lower=None, progress=lambda now: None, **limits):
        comparer = Comparer(
            sides or (A, B),
            ComparisonLimits(**limits),
            take=self.take,
            clock=lambda: self.now,
            progress=progress,
            seed=SEED,
        )
        return comparer.run(choice, lower=lower)


def steady(value, scatter=0.01):
    """Values around one, the same at each call."""
    return lambda number: value * (1 + scatter * ((number * 7) % 5 - 2) / 2)
