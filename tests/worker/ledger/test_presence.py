"""The wrapper of calls leaves where it would only cost time, and comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from cpulaunch.worker.ledger import presence as module
from cpulaunch.worker.ledger.presence import FIRST_WINDOWS, MAX_ABSENCES, WINDOW_SECONDS, Presence
from tests.worker.applying import case, run_cases

pytestmark = pytest.mark.torch
COSTLY = 10_000
"""Calls in a window of which the wrapper is a share of more than one per cent."""


class Wrapper:
    """A wrapper of calls whose absences end at once, when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, put: Callable[[], bool] = lambda: True) -> None:
        self.is_there, self.absences, self.now = True, list[float](), 0.0
        self._put = put
        monkeypatch.setattr(module, "_has_threads", lambda: True)
        monkeypatch.setattr(module, "start_new_thread", lambda _, seconds: self.absences.extend(seconds))
        self.presence = Presence(self.leave, self.come)

    def leave(self) -> bool:
        self.is_there = False
        return True

    def come(self) -> bool:
        self.is_there = self._put()
        return self.is_there

    def windows(self, count: int, *, calls: int = COSTLY, parts: int = 1, others: bool = False) -> None:
        for _ in range(count):
            self.presence.count(calls, parts)
            if others:
                self.presence.see_other()
            self.now += 1.01 * WINDOW_SECONDS
            self.presence.look(self.now)


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Wrapper:
    wrapper = Wrapper(monkeypatch)
    wrapper.windows(1)  # What was before the first look is not known.
    return wrapper


def test_it_leaves_where_all_calls_are_short_and_plain(wrapper: Wrapper) -> None:
    wrapper.windows(FIRST_WINDOWS - 1)
    assert wrapper.is_there
    wrapper.windows(1)
    assert not wrapper.is_there
    assert wrapper.presence.come_back()
    assert wrapper.is_there


def test_parts_of_a_module_count(wrapper: Wrapper) -> None:
    wrapper.windows(FIRST_WINDOWS, calls=COSTLY // 10, parts=10)
    assert not wrapper.is_there


@pytest.mark.parametrize(("calls", "is_there"), [(4000, True), (4500, False)])
def test_it_leaves_from_one_per_cent_of_the_time_on(wrapper: Wrapper, calls: int, is_there: bool) -> None:
    wrapper.windows(FIRST_WINDOWS, calls=calls)
    assert wrapper.is_there is is_there


def test_it_stays_where_other_calls_need_it(wrapper: Wrapper) -> None:
    wrapper.windows(10 * FIRST_WINDOWS, others=True)
    assert wrapper.is_there


def test_one_call_that_needs_it_keeps_it_longer(wrapper: Wrapper) -> None:
    wrapper.windows(FIRST_WINDOWS - 1)
    wrapper.windows(1, others=True)
    wrapper.windows(FIRST_WINDOWS - 1)
    assert wrapper.is_there


def test_it_leaves_soon_again_unless_other_calls_have_come(wrapper: Wrapper) -> None:
    wrapper.windows(FIRST_WINDOWS)
    wrapper.presence.come_back()
    wrapper.now += 1000.0  # The time away is in no window.
    wrapper.windows(2)
    assert not wrapper.is_there
    wrapper.presence.come_back()
    wrapper.windows(2, others=True)
    wrapper.windows(2 * FIRST_WINDOWS - 1)
    assert wrapper.is_there
    wrapper.windows(1)
    assert not wrapper.is_there
    assert wrapper.absences == [1.0, 1.1, 1.0]


def test_it_stays_once_another_mode_is_chosen(wrapper: Wrapper) -> None:
    wrapper.windows(FIRST_WINDOWS)
    wrapper.presence.stay()
    wrapper.presence.come_back()
    wrapper.windows(10 * FIRST_WINDOWS)
    assert wrapper.is_there


def test_nothing_is_put_there_that_was_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    puts = list[bool]()
    wrapper = Wrapper(monkeypatch, put=lambda: not puts.append(True))
    wrapper.presence.come_back()
    assert not puts


def test_absences_grow_and_end(wrapper: Wrapper) -> None:
    wrapper.windows(FIRST_WINDOWS - 2)
    for _ in range(2 * MAX_ABSENCES):
        wrapper.windows(2)
        wrapper.presence.come_back()
    assert len(wrapper.absences) == MAX_ABSENCES
    assert wrapper.absences[0] == 1.0
    assert wrapper.absences == sorted(wrapper.absences)
    assert wrapper.absences[-1] == 600.0
    assert wrapper.is_there


def test_it_stays_without_a_thread_that_would_bring_it_back(wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "start_new_thread", refuse)
    wrapper.windows(FIRST_WINDOWS)
    assert wrapper.is_there


def test_it_stays_in_a_process_of_one_thread(wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_threads", lambda: False)
    wrapper.windows(2 * FIRST_WINDOWS)
    assert wrapper.is_there


def test_it_comes_back_later_where_the_program_has_put_its_own_there(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([False, False, True])
    wrapper, waited = Wrapper(monkeypatch, put=lambda: next(tries)), list[float]()
    wrapper.windows(FIRST_WINDOWS + 1)
    monkeypatch.setattr(module, "sleep", waited.append)
    wrapper.presence._wait(20.0)
    assert wrapper.is_there
    assert waited == [20.0, 1.0, 1.0]


def test_it_may_leave_again_before_its_return_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def put() -> bool:  # Another thread's calls, meanwhile.
        wrapper.windows(2)
        return True

    wrapper = Wrapper(monkeypatch, put=put)
    wrapper.windows(FIRST_WINDOWS + 1)
    assert not wrapper.presence.come_back()
    monkeypatch.setattr(wrapper, "_put", lambda: True)
    assert wrapper.presence.come_back()


def test_it_comes_back_in_a_child_of_a_fork_during_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    there = list[bool]()

    def put() -> bool:
        monkeypatch.setattr(wrapper, "_put", lambda: there.append(True) or True)
        wrapper.presence.return_in_child()  # As in the child of another thread that forks now.
        return True

    wrapper = Wrapper(monkeypatch, put=put)
    wrapper.windows(FIRST_WINDOWS + 1)
    assert wrapper.presence.come_back()
    assert there == [True]


def test_it_comes_back_in_a_child_too_where_the_program_has_put_its_own_there(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = Wrapper(monkeypatch, put=lambda: False)
    wrapper.windows(FIRST_WINDOWS + 1)
    wrapper.presence.return_in_child()
    assert wrapper.absences == [1.0, 1.0]


QUICK = """
from cpulaunch.worker.ledger import presence
presence.WINDOW_SECONDS, presence.FIRST_WINDOWS, presence.FIRST_ABSENCE = 0.02, 2, LENGTH
threading = __import__("threading")
threading.Thread(target=threading.Event().wait, daemon=True).start()  # Any other thread.
"""
CALLS = """
import time
nn, plain = torch.nn, torch.nn.Module._wrapped_call_impl
model, x = nn.Linear(16, 4).eval(), torch.randn(2, 16)
expected = plain(model, x)

def wait_until(is_there, seconds=60):
    ends = time.monotonic() + seconds
    while (nn.Module.__call__ is not plain) != is_there:
        assert time.monotonic() < ends
        for _ in range(100):
            assert torch.equal(model(x), expected)

def is_there_for(seconds, other):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        other()
        for _ in range(100):
            model(x)
        assert nn.Module.__call__ is not plain

with torch.no_grad():
"""
BACK = "    wait_until(False); wait_until(True); wait_until(False)"
FORK = """
    wait_until(False)
    child = os.fork()
    if child == 0:
        os._exit(0 if nn.Module.__call__ is not plain and torch.equal(model(x), expected) else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert nn.Module.__call__ is plain
"""
OWN = """
    wait_until(False)
    own = lambda self, *args: plain(self, *args)
    nn.Module.__call__ = own
    assert tried.wait(60)
    assert nn.Module.__call__ is own
    nn.Module.__call__ = plain
    wait_until(True)
"""
COMPILED = """
    compiled = torch.compile(model, backend="eager")
    is_there_for(3, lambda: compiled(x))
"""
PACKED = """
    wide, one = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).eval(), torch.randn(1, 2048)
    ends = time.monotonic() + 120
    while presence.Presence.stayed == 0:
        assert time.monotonic() < ends
        wide(one)
    is_there_for(3, int)
"""
CASES = {
    "back": (BACK, 0.2),
    "fork": (FORK, 5.0),
    "own wrapper": (OWN, 5.0),
    "compiled": (COMPILED, 0.2),
    "another mode is chosen": (PACKED, 0.2),
}
COUNTING = """
presence.Presence.stayed, stay = 0, presence.Presence.stay
def counted(self):
    presence.Presence.stayed += 1
    stay(self)
presence.Presence.stay = counted
tried, come_back = threading.Event(), presence.Presence.come_back
def counted_return(self):
    is_there = come_back(self)
    tried.set()
    return is_there
presence.Presence.come_back = counted_return
"""


def test_the_wrapper_of_real_calls_leaves_and_comes_back(tmp_path: Path) -> None:
    cases = {
        name: case(CALLS + text, before=QUICK.replace("LENGTH", str(seconds)) + COUNTING, weights="int8")
        for name, (text, seconds) in CASES.items()
    }
    outcomes = run_cases(cases, tmp_path)
    assert {name: (each.code, each.err) for name, each in outcomes.items()} == dict.fromkeys(CASES, (0, ""))


@pytest.mark.parametrize("settings", [{"inference_mode": True}, {"precision": "bf16"}], ids=str)
def test_the_wrapper_stays_where_it_is_always_needed(tmp_path: Path, settings: dict[str, Any]) -> None:
    text = CALLS + "    is_there_for(2, int)"
    outcomes = run_cases({"stays": case(text, before=QUICK.replace("LENGTH", "0.2"), **settings)}, tmp_path)
    assert (outcomes["stays"].code, outcomes["stays"].err) == (0, "")
