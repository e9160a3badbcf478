"""Training steps measured in blocks: a step is a call, its backward pass and the optimizer, until the next call."""

from __future__ import annotations

from collections.abc import Callable

from cpulaunch.records.record import record, replace
from cpulaunch.worker.ledger.decision import HOPELESS, LONG_SECONDS, Decision
from cpulaunch.worker.ledger.verdict import Verdict

LENGTH = 6
"""Periods in a block: a whole number of steps for programs that call the model 1, 2, 3 or 6 times in a step."""

TRANSITION = 2
"""Periods that are not counted after a change of the mode, unless they are long."""

BLOCK_SECONDS = 10.0
"""A block ends early once it has taken so long: the steps of large models take longer than a block may cost."""


MIN_PERIODS = 3
"""Fewer periods do not show that one of them is much longer than the others."""


@record
class Block:
    """The periods of consecutive calls in one mode. `skip`: how many more do not count.

    `repeated`: the mean period of the block before, if this one repeats it.
    """

    mode: str
    skip: int
    periods: tuple[float, ...] = ()
    repeated: float | None = None

    def mean(self) -> float:
        """The mean period of the shorter one of a block and its repetition, in seconds."""
        mean = sum(self.periods) / len(self.periods)
        return mean if self.repeated is None else min(mean, self.repeated)

    def has_pause(self) -> bool:
        """Whether one period is longer than the others together: the program may have done something else too."""
        return len(self.periods) >= MIN_PERIODS and 2 * max(self.periods) > sum(self.periods)


class BlockDecision:
    """A Decision whose samples are mean periods of blocks of calls, so that each includes whole training steps.

    A block with a pause, such as for a checkpoint or the first data of an epoch, is repeated once.
    """

    def __init__(
        self, modes: tuple[str, ...], *, prior: str | None = None, ratio: Callable[[str], float] = lambda mode: 0.0
    ) -> None:
        self.decision = Decision(modes, warm_up=0, prior=prior, ratio=ratio)
        self._block: Block | None = None
        self._last = ""

    @property
    def chosen(self) -> str | None:
        """The mode that is chosen so far."""
        return self.decision.chosen

    @property
    def is_sampling(self) -> bool:
        """Whether the next call belongs to a block, or may be in another mode than the chosen one."""
        return self.decision.is_sampling or self._block is not None

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that are left."""
        return self.decision.modes

    def has_chosen(self, mode: str) -> bool:
        """As Decision.has_chosen."""
        return self.decision.has_chosen(mode)

    def estimate(self, mode: str) -> float:
        """The typical period in the mode, in seconds."""
        return self.decision.estimate(mode)

    def next(self, credit: float = 0.0) -> str:
        """The mode of the next call. `credit`: seconds that the module may lose by trying modes."""
        if self._block is None:
            mode = self.decision.next(credit / (LENGTH + TRANSITION))
            self._block = Block(mode=mode, skip=0 if mode == self._last else TRANSITION)
        return self._block.mode

    def add(self, mode: str, seconds: float, *, steady: bool = True) -> bool:
        """Whether the chosen mode has changed. Effect: counts a period; a full block gives a sample."""
        block = self._block
        self._last = mode
        if block is None or block.mode != mode or not steady:
            return False
        if block.skip and seconds < LONG_SECONDS:
            self._block = replace(block, skip=block.skip - 1)
            return False
        periods = (*block.periods, seconds)
        self._block = block = replace(block, skip=0, periods=periods)
        if len(periods) < LENGTH and sum(periods) < BLOCK_SECONDS and not self._is_hopeless(periods):
            return False
        if block.repeated is None and block.has_pause():
            self._block = Block(mode=mode, skip=0, repeated=block.mean())
            return False
        self._block = None
        return self.decision.add(mode, block.mean(), periods=len(periods))

    def _is_hopeless(self, periods: tuple[float, ...]) -> bool:
        """Whether even the shortest of these periods is longer than the mean of another mode's by far."""
        best = min(map(self.decision.estimate, self.decision.modes))
        return len(periods) > 2 and min(periods) > HOPELESS * best

    def postpone(self, mode: str, seconds: float) -> None:
        """Effect: the mode is not sampled for a while."""
        self._block = None
        self.decision.postpone(mode, seconds)

    def skip(self, calls: int) -> None:
        """Effect: counts calls in the chosen mode that were not measured."""
        self.decision.skip(calls // LENGTH)

    def remove(self, mode: str) -> None:
        """Effect: the mode is not used any more."""
        if self._block is not None and self._block.mode == mode:
            self._block = None
        self.decision.remove(mode)

    def has_lost(self, mode: str, *, seconds: float) -> bool:
        """As Decision.has_lost."""
        return self.decision.has_lost(mode, seconds=seconds)

    def verdict(self) -> Verdict:
        """The choice as it stands."""
        return self.decision.verdict()
