"""A study: all trials of one program on one machine, in a database that survives the end of any process.

optuna's storage is SQLite with a write-ahead log: a trial that was finished before a kill is there afterwards, and one
that was not is tried again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import warnings
from datetime import UTC, datetime

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from cpulaunch.measure.tuning.database import FILE, open_storage
from cpulaunch.measure.tuning.trial import nearest_speed
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.record import record
from cpulaunch.system.files.caches import open_lock_beside
from cpulaunch.system.files.folders import close_to_others, empty_folder, make_secure_folder, open_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from cpulaunch.measure.tuning.space import Configuration, Dimension

FACTS, FAILURE = "facts", "failure"
WANTED = "wanted"
"""Attribute of a trial: its values, which optuna writes one by one when the trial begins."""
INTERRUPTED = "interrupted"
"""Attribute of a study: the numbers of trials during which the process ended, and that are tried again."""
KILLED = "killed_trials"
"""Attribute of a study: by configuration, the numbers of its trials during which the process was killed."""
MOST_KILLS = 3
"""A configuration during which the search is killed so often is taken as the reason, such as one that takes all memory
of a container."""
KILLED_TEXT = f"the search was killed {MOST_KILLS} times while it was tried"
FAILURES = "failures"
"""Attribute of a study: by number, why trials that a killed process left have failed."""
BASELINE = "baseline"
"""Attribute of a study: the samples of the default."""
SESSIONS = "sessions"
"""Attribute of a study: how many processes have used it. Speeds of one are not compared with the default of another."""
STARTUP_TRIALS = 6
"""Trials before TPE models them; the first ones are not drawn by it anyway."""


@record
class TuningTrial:
    """A trial that has ended. `ratio`: how many times as fast as the default; None if it failed, for `failure`.

    `facts`: what was measured, as JSON data. `pruned`: it was measured once, being clearly slower than the best.
    `started`, `ended`: times in UTC, as ISO text. `earlier`: another process measured it.
    """

    number: int
    configuration: Configuration
    ratio: float | None
    facts: Mapping[str, Any]
    failure: str | None = None
    pruned: bool = False
    started: str | None = None
    ended: str | None = None
    earlier: bool = False


class Study:
    """The trials of a folder, which one process at a time may add to; without a folder they are in memory alone."""

    def __init__(self, folder: str | None, space: Sequence[Dimension], *, seed: int, fresh: bool = False) -> None:
        """Effect: with `fresh`, what is in the folder is gone. Raises: CpulaunchError if another process uses it."""
        self._space = {dimension.name: dimension for dimension in space}
        self._locks = () if folder is None else _locked(folder)
        if fresh and self._locks:
            empty_folder(self._locks[0])
        self._running: dict[int, Any] = {}
        optuna.logging.set_verbosity(logging.ERROR)
        try:
            self._open(folder, seed)
            self._retry_unfinished()
        except BaseException:
            self.close()
            raise

    def _open(self, folder: str | None, seed: int) -> None:
        """Effect: what earlier processes measured is known, and this one has a session of its own."""
        with _quiet():
            self._study = optuna.create_study(
                storage=None if folder is None else open_storage(os.path.join(folder, FILE)),
                study_name="tune",
                direction="minimize",
                load_if_exists=True,
            )
            self._sampler = optuna.samplers.TPESampler(
                seed=seed + len(self._study.get_trials(deepcopy=False)),
                multivariate=True,
                n_startup_trials=STARTUP_TRIALS,
            )
        self._session = self._study.user_attrs.get(SESSIONS, 0) + 1
        self._study.set_user_attr(SESSIONS, self._session)
        self._baselines: list[dict[str, Any]] = list(self._study.user_attrs.get(BASELINE, []))

    def close(self) -> None:
        """Effect: other processes may use the folder."""
        for lock in self._locks:
            os.close(lock)

    def _retry_unfinished(self) -> None:
        """Effect: trials that a killed process left are failed, and the next ones to be asked for, but not for ever."""
        killed: dict[str, list[int]] = dict(self._study.user_attrs.get(KILLED, {}))
        put_back = self._study.user_attrs.get(INTERRUPTED, [])
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            launching = trial.params.keys() == self._space.keys() and FACTS not in trial.user_attrs
            if not launching or trial.number in put_back:
                self._retry(trial)  # The kill came before the launch or after it, or while the trial was put back.
                continue
            key = json.dumps(trial.params, sort_keys=True)
            killed[key] = sorted({*killed.get(key, []), trial.number})
            self._study.set_user_attr(KILLED, killed)
            if len(killed[key]) >= MOST_KILLS:
                self._fail_unfinished(trial, KILLED_TEXT)
            else:
                self._retry(trial)

    def _fail_unfinished(self, trial: optuna.trial.FrozenTrial, reason: str) -> None:
        """Effect: the trial of another process has failed for this reason."""
        known = self._study.user_attrs.get(FAILURES, {})
        self._study.set_user_attr(FAILURES, {**known, str(trial.number): reason})
        self._study.tell(trial.number, state=TrialState.FAIL)

    def _failure(self, trial: optuna.trial.FrozenTrial) -> str:
        """Why a trial has no result. That of another process cannot be given attributes, but the study can."""
        told = trial.user_attrs.get(FAILURE) or self._study.user_attrs.get(FAILURES, {}).get(str(trial.number))
        return str(told or "it has no result")

    def _retry(self, trial: optuna.trial.FrozenTrial) -> None:
        """Effect: the trial has ended without a result, and is the next one to be asked for.

        In this order a kill at any moment leaves it running, or waiting.
        """
        known = self._study.user_attrs.get(INTERRUPTED, [])
        if trial.number not in known:
            self._study.set_user_attr(INTERRUPTED, [*known, trial.number])
        wanted = trial.user_attrs.get(WANTED, trial.params)
        waiting = [each.user_attrs.get(WANTED) for each in self._waiting()]
        if wanted.keys() == self._space.keys() and wanted not in waiting:
            self._enqueue(wanted)
        self._study.tell(trial.number, state=TrialState.FAIL)

    def _enqueue(self, texts: Mapping[str, Any]) -> None:
        """Effect: the trial of these values is the next one to be asked for. It has all of them before it has begun."""
        self._study.enqueue_trial(dict(texts), user_attrs={WANTED: dict(texts)}, skip_if_exists=False)

    def interrupt(self) -> None:
        """Effect: trials that are running end without a result, and are tried again by the next search."""
        self._running.clear()
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._retry(trial)

    @property
    def waiting(self) -> bool:
        """Whether a trial is to be tried again."""
        return bool(self._waiting())

    def _waiting(self) -> list[optuna.trial.FrozenTrial]:
        return list(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def begin(self, configuration: Configuration | None = None) -> tuple[int, Configuration]:
        """The number and the configuration of a new trial: a waiting one, else the given one, else one that TPE draws.

        Effect: it is running.
        """
        with _quiet():
            if not self.waiting:
                texts = self._drawn() if configuration is None else self._texts(configuration)
                self._enqueue(texts)
            trial = self._study.ask(self._distributions())
        self._running[trial.number] = trial
        return trial.number, self._configuration(trial.params)

    def _distributions(self) -> dict[str, CategoricalDistribution]:
        return {name: CategoricalDistribution(each.texts()) for name, each in self._space.items()}

    def _current(self) -> optuna.Study:
        """A study in memory of the trials that succeeded, with their ratios to the default as it is known now."""
        current = optuna.create_study(direction="minimize", sampler=self._sampler)
        for trial in self.trials():
            if trial.ratio is not None:
                texts, value = self._texts(trial.configuration), -math.log(trial.ratio)
                current.add_trial(
                    optuna.trial.create_trial(params=texts, distributions=self._distributions(), value=value)
                )
        return current

    def _drawn(self) -> dict[str, Any]:
        """What TPE draws."""
        return dict(self._current().ask(self._distributions()).params)

    def finish(self, number: int, ratio: float, facts: Mapping[str, Any], *, pruned: bool = False) -> None:
        """Effect: the trial has ended. The ratio is that of now: with `speed` among the facts, it follows the default.

        Without it, it is that of the trial `same_as`, if there is one, or stays.
        """
        trial = self._running.pop(number)
        trial.set_user_attr(FACTS, {**facts, **self._place(), "pruned": pruned})
        self._study.tell(trial, -math.log(ratio))

    def _place(self) -> dict[str, int]:
        """Where a trial that ends now stands among the samples of the default."""
        return {"session": self._session, "baselines": len(self._default_speeds(self._session))}

    def fail(self, number: int, reason: str, facts: Mapping[str, Any]) -> None:
        """Effect: the trial has failed for this reason, and never wins."""
        trial = self._running.pop(number)
        trial.set_user_attr(FACTS, {**facts, **self._place()})
        trial.set_user_attr(FAILURE, reason)
        self._study.tell(trial, state=TrialState.FAIL)

    def trials(self) -> tuple[TuningTrial, ...]:
        """Every trial that has ended, in the order of their starts, without those that were tried again."""
        ended = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
        interrupted = set(self._study.user_attrs.get(INTERRUPTED, []))
        found: dict[int, TuningTrial] = {}
        for each in ended:
            if each.number not in interrupted:
                found[each.number] = self._trial(each, found)
        return tuple(found.values())

    def add_baseline(self, value: float, seconds: float, metrics: Mapping[str, float], *, speed: float) -> None:
        """Effect: the study has one more sample of the default, measured now; ratios of trials near it follow it."""
        shown = {"time": _utc(datetime.now()), "value": value, "seconds": round(seconds, 3), "metrics": dict(metrics)}
        self._baselines.append({**shown, "speed": speed, "session": self._session})
        self._study.set_user_attr(BASELINE, self._baselines)

    def baselines(self) -> list[dict[str, Any]]:
        """Every sample of the default: its time, figure, seconds and metrics."""
        return [{name: each[name] for name in ("time", "value", "seconds", "metrics")} for each in self._baselines]

    def _default_speeds(self, session: int) -> list[float]:
        """The default's speeds that this process measured."""
        return [each["speed"] for each in self._baselines if each["session"] == session]

    def _trial(self, trial: optuna.trial.FrozenTrial, before: Mapping[int, TuningTrial]) -> TuningTrial:
        facts = _checked(trial.user_attrs.get(FACTS, {}))
        ratio = math.exp(-trial.value) if trial.state == TrialState.COMPLETE and trial.value is not None else None
        if ratio is not None and facts.get("same_as") in before:
            ratio = before[facts["same_as"]].ratio or ratio
        elif ratio is not None and facts.get("speed") and (default := self._default_speeds(facts["session"])):
            count = facts["baselines"]
            ratio = facts["speed"] / nearest_speed(default[:count], default[count:])
        if ratio is not None and not 0 < ratio < math.inf:
            raise ValueError("no ratio of a trial")
        return TuningTrial(
            number=trial.number,
            configuration=self._configuration(trial.params),
            ratio=ratio,
            facts=facts,
            failure=None if ratio is not None else self._failure(trial),
            earlier=facts.get("session") != self._session,
            pruned=bool(facts.get("pruned")),
            started=_utc(trial.datetime_start),
            ended=_utc(trial.datetime_complete),
        )

    def _texts(self, configuration: Configuration) -> dict[str, str]:
        return {name: each.texts()[each.values.index(configuration.get(name))] for name, each in self._space.items()}

    def _configuration(self, params: Mapping[str, Any]) -> Configuration:
        """The configuration of a trial; settings that are not in the space are left out."""
        found = {}
        for name, each in self._space.items():
            texts = each.texts()
            value = each.values[texts.index(params[name])] if params.get(name) in texts else None
            if value is not None:
                found[name] = value
        return found


def _utc(time: datetime | None) -> str | None:
    """A local time, as optuna keeps them, in UTC."""
    return None if time is None else time.astimezone(UTC).isoformat(timespec="milliseconds")


def make_folder(path: str) -> str:
    """The path without links of this folder, which no other user can change: SQLite follows links in it.

    Effect: makes it, if it is missing, so that only this user can read it. Raises: CpulaunchError.
    """
    try:
        return make_secure_folder(path, users_group=True)
    except OSError as error:
        raise CpulaunchError(
            "the folder of the study cannot be used",
            value=f"{path}: {error.strerror}",
            hint="set XDG_STATE_HOME to a folder that only you can write",
        ) from None


def _locked(folder: str) -> tuple[int, int]:
    """Descriptors of the folder and of a file beside it, both held for this process. Raises: CpulaunchError.

    The folder's lock is one of this host. On NFS the file's is one of all hosts, two of which may not use the database
    at once. Source: flock(2), "NFS details"; SQLite, "Write-Ahead Logging".
    """
    found: list[int] = []
    try:
        for open_it in (open_own, open_lock_beside):
            found.append(open_it(folder))
            hold(found[-1], folder)
        close_to_others(found[0])  # SQLite makes files that all may read, and so lock.
    except BaseException as error:
        for fd in found:
            os.close(fd)
        if not isinstance(error, OSError):
            raise
        raise CpulaunchError("cannot open the study", value=f"{folder}: {error.strerror}") from None
    return found[0], found[1]


def hold(fd: int, folder: str) -> None:
    """Effect: this process alone has the lock of the descriptor. Raises: CpulaunchError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # Both mean that it is taken. Source: fcntl(2), F_SETLK.
        raise CpulaunchError(
            "another cpulaunch tune runs this study", value=folder, hint="wait for it, or end it"
        ) from None
    except OSError as error:
        raise CpulaunchError(
            "the study cannot be locked for this search",
            value=f"{folder}: {error.strerror}",
            hint="set XDG_STATE_HOME to a folder of a file system with locks",
        ) from None


def _checked(found: Any) -> dict[str, Any]:
    """The facts of a trial. Raises: TypeError, ValueError or AttributeError if the program has written others there."""
    facts = dict(found)
    numbers = [*facts.get("values", ()), *facts.get("metrics", {}).values(), facts.get("seconds", 0.0)]
    is_measured = all(isinstance(each, int | float) and math.isfinite(each) for each in numbers)
    if not is_measured or not isinstance(facts.get("disturbed", []), list):
        raise ValueError("no facts of a trial")
    return facts


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context without optuna's warnings of experimental parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
