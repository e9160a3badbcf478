"""The choice of a mode for one signature of a module: durations in, the next call's mode out."""

from __future__ import annotations

from collections.abc import Callable

from cpulaunch.worker.ledger.samples import COLD_CALLS, SETTLED_CALLS, SHORT_SECONDS, WARM_UP, Samples
from cpulaunch.worker.ledger.verdict import Verdict

PLAIN = "plain"
"""The mode of the program as it is, which needs no reason; another mode must be faster."""

MIN_GAIN = 0.02
"""The share of plain's duration that another mode must save, so that a tie within the noise means plain."""

KEPT_GAIN = 0.01
"""The share that a chosen mode must still save to stay chosen: less than MIN_GAIN, so that a tie does not alternate."""

HOPELESS = 1.5
"""A mode other than plain that takes longer than the best one by this factor is not sampled further."""

FAR_TOO_SLOW = 3.0
"""A mode that took longer by this factor for all signatures so far is sampled for a new one only from the credit."""

NOISE = 0.2
"""The share of its duration by which a call in another mode may exceed one in the chosen mode by chance alone."""

UNKNOWN = 64.0
"""The factor by which a mode may take longer that no signature has shown yet: text generation has shown as much."""

CONTESTED = 1.1
"""Modes within this factor of the best one get further samples before the choice."""

ROUNDS = (1, 3, 5, 12)
"""Samples of each mode after each round of sampling; rounds after the second are of contested modes only."""

START_SECONDS = 10.0
"""After calls of so many seconds, only modes that are faster than plain so far get further samples.

It bounds what the first samples of long calls cost: the others are tried again later, from the credit.
"""

LONG_SECONDS = 1.0
"""Of calls that take at least as long a warm-up is a small part: it shows at once that a mode is hopeless."""

PATIENCE_SECONDS = 60.0
"""After so many seconds of a module's calls, of short ones, a mode may have lost for good: another program may have had
the CPUs until then."""

MAX_UNSTEADY = 12
"""Successive calls of a mode that may be under preparation (a graph is captured) before their durations count."""

TRIAL_SAMPLES = 3
"""Samples of a mode that is tried again, unless the first shows that it is still slower. A contested one needs twice as
many: the shortest of a few durations is shorter than the typical one."""

FIRST_WAIT, LAST_WAIT = 128, 1 << 17
"""Calls before a mode that has lost is tried again: doubled each time that it loses."""

FIRST_PAUSE, LAST_PAUSE, LAST_PAUSE_CALLS = 0.25, 1.0, 12
"""Seconds of calls before a postponed mode is tried again: doubled each time, up to these, or so many short calls."""

REGIME_WAIT = 32
"""Calls between two trials because the chosen mode has become slower: doubled each time that it stays chosen."""

REGIME_CHANGE = 1.1
"""The chosen mode has become slower if it takes longer than at its choice by this factor."""

QUIETER = 1.5
"""Plain is tried again once the chosen mode takes less than when plain lost to it, by this factor."""


class Decision:
    """The modes of one signature. Each call is run once, in the mode that `next` names, and reported to `add`.

    At first the modes are sampled in turn, the first of `modes` first. A mode other than plain is chosen only if it
    saves MIN_GAIN. From then on the chosen mode runs; another one is tried again if the module's credit pays for it,
    or if the chosen one has become slower than the other was.

    `prior`: a mode chosen without samples. `ratio`: how much longer a mode took than the chosen one for other
    signatures, at least; a mode that was far too slow for all of them is not sampled at first.
    """

    def __init__(
        self,
        modes: tuple[str, ...],
        *,
        warm_up: int = WARM_UP,
        prior: str | None = None,
        ratio: Callable[[str], float] = lambda mode: 0.0,
    ) -> None:
        self.modes = modes
        self._ratio = ratio
        self.chosen = prior if prior in modes else (modes[0] if len(modes) == 1 else None)
        self.calls = 0
        self._warm_up = warm_up
        self.samples = {mode: self._new_samples() for mode in modes}
        self._unsteady = dict.fromkeys(modes, 0)
        self._due = dict.fromkeys(modes, 0)
        self._wait = dict.fromkeys(modes, FIRST_WAIT)
        self._seconds = 0.0
        self._last = ""
        self._postponed: dict[str, tuple[float, float]] = {}
        self._trial: tuple[str, Samples] | None = None
        self._winner: tuple[str, Samples] | None = None
        self._reference = self._at_loss = float("inf")
        self._regime_due, self._regime_wait = 0, REGIME_WAIT

    @property
    def is_sampling(self) -> bool:
        """Whether the next call may be in another mode than the chosen one."""
        return self.chosen is None or self._trial is not None

    def has_chosen(self, mode: str) -> bool:
        """Whether the mode is chosen, by samples of this signature."""
        return self.chosen == mode and not self.is_sampling and self.estimate(mode) < float("inf")

    def estimate(self, mode: str) -> float:
        """The typical duration of a call in the mode, in seconds."""
        return self.samples[mode].estimate() if mode in self.samples else float("inf")

    def next(self, credit: float = 0.0) -> str:
        """The mode of the next call. `credit`: seconds that the module may lose by trying modes."""
        if self.chosen is None:
            return self._to_sample() or self._choose()
        if self._trial is None and len(self.modes) > 1:
            self._start_trial(credit)
        return self._trial[0] if self._trial is not None else self.chosen

    def add(self, mode: str, seconds: float, *, steady: bool = True, periods: int = 1) -> bool:
        """Whether the chosen mode has changed. Effect: counts a call, or the mean duration of so many `periods`.

        Durations of calls that prepared something (`steady` False) do not count, unless the mode never gets ready.
        """
        self.calls += 1
        self._seconds += seconds * periods
        if mode not in self.samples:
            return False
        if not steady and self._unsteady[mode] < MAX_UNSTEADY:
            self._unsteady[mode] += 1
            return False
        self._unsteady[mode] = 0 if steady else MAX_UNSTEADY
        before = self.chosen
        self._enter(mode)
        if self._trial is not None and self._trial[0] == mode:
            self._add_to_trial(*self._trial, seconds)
        else:
            self.samples[mode].add(seconds)
        if before is None and self._to_sample() is None:
            self._choose()
        elif mode == before:
            self._review()
        return self.chosen != before

    def _enter(self, mode: str) -> None:
        """Effect: what follows are calls in the mode; after those in another one the caches are cold."""
        if mode != self._last and self._warm_up:
            self.samples[mode].resume()
        self._last = mode

    def postpone(self, mode: str, seconds: float) -> None:
        """Effect: the mode is not sampled for a while, as its preparation goes on elsewhere. Counts a call in it."""
        self.calls += 1
        self._seconds += seconds
        self._unsteady[mode] = 0
        pause = self._postponed.get(mode, (0.0, FIRST_PAUSE))[1]
        longest = max(LAST_PAUSE, LAST_PAUSE_CALLS * min(seconds, self._quickest()))
        self._postponed[mode] = (self._seconds + pause, min(2 * pause, longest))
        self._end_trial_of(mode)
        if mode == self.chosen and self.estimate(mode) == float("inf") and PLAIN in self.modes:
            self.chosen = PLAIN  # Without samples of any mode, none could be compared with it.

    def skip(self, calls: int) -> None:
        """Effect: counts calls in the chosen mode that were not measured."""
        self.calls += calls
        if self.chosen in self.samples:
            self._enter(self.chosen)
            self.samples[self.chosen].settle(calls)
        typical = self.estimate(self.chosen or PLAIN)
        self._seconds += calls * typical if typical < float("inf") else 0.0

    def remove(self, mode: str) -> None:
        """Effect: the mode is not used any more. The last mode and plain stay."""
        if mode == PLAIN or mode not in self.modes or len(self.modes) == 1:
            return
        self.modes = tuple(each for each in self.modes if each != mode)
        self._end_trial_of(mode)
        if self.chosen == mode:
            self.chosen = self._trial = self._winner = None
        if self.chosen is None and len(self.modes) == 1:
            self.chosen = self.modes[0]

    def _end_trial_of(self, mode: str) -> None:
        """Effect: no trial of the mode goes on."""
        if mode in (each[0] for each in (self._trial, self._winner) if each is not None):
            self._trial = self._winner = None

    def has_lost(self, mode: str, *, seconds: float = PATIENCE_SECONDS) -> bool:
        """Whether the mode is far slower than the chosen one, or has lost a later trial too.

        `seconds`: of the module's calls so far, of which short ones need some: a burst of other work may double two
        calls of a mode in a row.
        """
        samples = self.samples[mode]
        if self.chosen in (None, mode) or self.is_sampling or samples.shortest == float("inf"):
            return False
        typical = samples.estimate() if samples.count else samples.shortest
        own = self.estimate(self.chosen or PLAIN)
        may_be_noise = samples.shortest < SHORT_SECONDS or (typical < LONG_SECONDS and typical < FAR_TOO_SLOW * own)
        if may_be_noise and seconds < PATIENCE_SECONDS:
            return False
        return self._wait[mode] > FIRST_WAIT or typical > HOPELESS * own

    def verdict(self) -> Verdict:
        """The choice as it stands."""
        mode = self.chosen or self.modes[0]
        plain, own = self.estimate(PLAIN), self.estimate(mode)
        speedup = plain / own if 0 < own < float("inf") and plain < float("inf") else None
        return Verdict(mode=mode, speedup=speedup, samples={each: self.samples[each].count for each in self.modes})

    # The first samples

    def _to_sample(self) -> str | None:
        """The mode that lacks samples for the first choice; None if none does."""
        best = min(map(self.estimate, self.modes))
        for target in ROUNDS:
            near = [mode for mode in self.modes if self._is_near(mode, best, target)]
            if target > ROUNDS[1] and (len(near) < 2 or self._seconds > START_SECONDS):
                return None
            for mode in self._unseen_first(near):
                if self.samples[mode].count < target and not self._is_postponed(mode):
                    return mode
        return None

    def _is_near(self, mode: str, best: float, target: int) -> bool:
        """Whether the mode is so close to the best one, which takes `best` seconds, that it gets `target` samples."""
        samples = self.samples[mode]
        if not samples.count and self._ratio(mode) > FAR_TOO_SLOW and mode != PLAIN:
            return False
        if mode != PLAIN and not samples.count and self._is_long_and_hopeless(samples.shortest):
            return False
        if not samples.count:
            return True
        if self._seconds > START_SECONDS and PLAIN in self.modes:
            return samples.shortest <= self.samples[PLAIN].shortest and (mode != PLAIN or samples.estimate() > best)
        if target > ROUNDS[1]:
            return samples.estimate() <= best * CONTESTED
        return mode == PLAIN or samples.shortest <= best * HOPELESS or _is_unclear(samples)

    def _bound(self, mode: str) -> float:
        """The longest typical duration that the samples of the mode allow for, in seconds: noise must not choose it."""
        return self.estimate(mode) + (self.samples[mode].uncertainty() if self.samples[mode].count else 0.0)

    def _quickest(self) -> float:
        """The shortest duration of any call so far, warm-ups included, in seconds; infinite before the first call."""
        return min(self.samples[mode].shortest for mode in self.modes)

    def _unseen_first(self, modes: list[str]) -> list[str]:
        """The modes in the order of sampling: where calls are long, each mode is seen once before any is seen again."""
        if not LONG_SECONDS <= self._quickest() < float("inf"):
            return modes
        return sorted(modes, key=lambda mode: self.samples[mode].shortest < float("inf"))

    def _is_long_and_hopeless(self, seconds: float) -> bool:
        """Whether a mode whose only call was a warm-up of this duration is not called again."""
        return seconds < float("inf") and LONG_SECONDS <= self._quickest() < seconds / HOPELESS

    def _is_postponed(self, mode: str) -> bool:
        return mode in self._postponed and self._seconds < self._postponed[mode][0]

    def _choose(self) -> str:
        """The fastest mode; plain if it is not faster by MIN_GAIN. Effect: makes it the chosen one."""
        best = min(self.modes, key=self.estimate)
        needed = KEPT_GAIN if best == self.chosen else MIN_GAIN
        if PLAIN in self.modes and self._bound(best) > self.estimate(PLAIN) * (1 - needed):
            best = PLAIN
        if best != self.chosen:
            self._wait = dict.fromkeys(self._wait, FIRST_WAIT)
        self.chosen, self._reference = best, self.estimate(best)
        self._at_loss = self._reference
        for mode in self.modes:
            self._due[mode] = self.calls if mode in self._postponed else self.calls + self._wait[mode]
        if best != PLAIN:  # A choice that noise has made must not last.
            self._due[PLAIN] = self.calls + REGIME_WAIT
        return best

    # Later trials

    def _start_trial(self, credit: float) -> None:
        own = self.estimate(self.chosen or PLAIN)
        for mode in filter(self._is_due, (PLAIN, *self.modes) if own < float("inf") else ()):
            expected = self._expected(mode, own)
            if mode in self._postponed or credit >= self._trial_calls(expected) * max(expected - own, NOISE * own):
                self._trial = (mode, self._new_samples())
                return

    def _is_due(self, mode: str) -> bool:
        is_other = mode != self.chosen and mode in self.modes
        return is_other and self.calls >= self._due[mode] and not self._is_postponed(mode)

    def _trial_calls(self, seconds: float) -> int:
        """How many calls show at least that a mode is still slower, if each takes so many seconds."""
        return WARM_UP + SETTLED_CALLS + ROUNDS[1] if self._warm_up and seconds < SHORT_SECONDS else 2

    def _new_samples(self) -> Samples:
        return Samples(warm_up=self._warm_up, cold=COLD_CALLS if self._warm_up else 0)

    def _expected(self, mode: str, own: float) -> float:
        """The duration expected of a call in a mode, in seconds. `own`: that of the chosen mode."""
        known = self.samples[mode].shortest
        return known if known < float("inf") else own * max(HOPELESS, self._ratio(mode) or UNKNOWN)

    def _add_to_trial(self, mode: str, samples: Samples, seconds: float) -> None:
        samples.add(seconds)
        if not samples.count:
            return
        if mode == self.chosen:
            self._add_to_confirmation(samples)
            return
        own = self.estimate(self.chosen or PLAIN)
        lost = self._has_lost_trial(mode, samples, own)
        is_contested = samples.estimate() > own / CONTESTED
        if samples.count < TRIAL_SAMPLES * (1 + is_contested) and (not lost or _is_unclear(samples)):
            return
        if lost:
            self._end_trial(mode, samples, own=own, lost=lost)
        else:  # The machine may be quicker than when the chosen mode was measured.
            self._winner, self._trial = (mode, samples), (self.chosen or PLAIN, self._new_samples())

    def _add_to_confirmation(self, samples: Samples) -> None:
        """Effect: decides about a trial that another mode seems to have won, once the chosen one is measured again."""
        if samples.count < TRIAL_SAMPLES or self._winner is None or self.chosen is None:
            return
        mode, won = self._winner
        own = samples.estimate()
        self.samples[self.chosen] = samples
        self._winner = None
        self._end_trial(mode, won, own=own, lost=self._has_lost_trial(mode, won, own))

    def _has_lost_trial(self, mode: str, samples: Samples, own: float) -> bool:
        """Whether the mode is not faster by enough than the chosen one, whose calls take `own` seconds."""
        if mode == PLAIN:
            return samples.estimate() > own * (1 + KEPT_GAIN)
        return samples.estimate() + samples.uncertainty() > own * (1 - MIN_GAIN)

    def _end_trial(self, mode: str, samples: Samples, *, own: float, lost: bool) -> None:
        """Effect: the samples of the mode are those of its trial, which it has `lost` or won."""
        self.samples[mode], self._trial = samples, None
        is_first = self._postponed.pop(mode, None) is not None
        if not lost or self._faster_than(own) is None:
            self._reference = own
        else:  # The chosen mode has become slower: each mode that was faster than it is now gets its trial.
            self._regime_due = self.calls
        if lost:
            self._at_loss = own if mode == PLAIN else self._at_loss
            self._wait[mode] = self._wait[mode] if is_first else min(2 * self._wait[mode], LAST_WAIT)
            self._due[mode] = self.calls + self._wait[mode]
        else:
            self._choose_over(mode, own)

    def _choose_over(self, mode: str, own: float) -> None:
        """Effect: the mode that has won its trial becomes the chosen one, unless plain was faster than it."""
        plain = self.estimate(PLAIN)
        self._wait = dict.fromkeys(self._wait, FIRST_WAIT)
        self._regime_wait = REGIME_WAIT
        self.chosen = mode
        self._reference = self._at_loss = self.estimate(mode)
        self._due = {
            each: self.calls if each in self._postponed else self.calls + self._wait[each] for each in self._due
        }
        if mode != PLAIN:  # As in `_choose`.
            self._due[PLAIN] = self.calls + (0 if plain < self._reference < own else REGIME_WAIT)

    def _review(self) -> None:
        """Effect: if the chosen mode has become slower than another one was, the other one is tried next.

        If it has become faster than when plain lost to it, plain may have too: other work may have ended.
        """
        if self._trial is not None or self.chosen is None or self.calls < self._regime_due:
            return
        own = self.estimate(self.chosen)
        self._reference = min(own, self._reference)
        if own * QUIETER < self._at_loss:
            self._at_loss, self._due[PLAIN] = own, self.calls
        if own <= self._reference * REGIME_CHANGE or (mode := self._faster_than(own)) is None:
            return
        self._trial = (mode, self._new_samples())
        self._regime_due = self.calls + self._regime_wait
        self._regime_wait = min(2 * self._regime_wait, LAST_WAIT)

    def _faster_than(self, own: float) -> str | None:
        """The fastest other mode by its last samples, if it took less than the chosen one does, which takes `own`."""
        mode = min((mode for mode in self.modes if mode != self.chosen), key=self.estimate, default=None)
        return mode if mode is not None and self.estimate(mode) < own * (1 - MIN_GAIN) else None


def _is_unclear(samples: Samples) -> bool:
    """Whether the calls are too short, and too few, to show that a mode is hopeless."""
    return samples.count < ROUNDS[1] and samples.shortest < SHORT_SECONDS
