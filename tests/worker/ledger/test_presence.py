"""The wrapper of calls leaves where it would only cost time, and comes back."""

import textwrap
import time
from collections.abc import Callable
from pathlib import Path

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
        monkeypatch.setattr(module._thread, "start_new_thread", lambda _, seconds: self.absences.extend(seconds))
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


@pytest.mark.parametrize("options", [{"calls": COSTLY // 10}, {"others": True}], ids=str)
def test_it_stays_where_it_costs_little_or_is_needed(wrapper: Wrapper, options: dict[str, int]) -> None:
    wrapper.windows(10 * FIRST_WINDOWS, **options)
    assert wrapper.is_there


def test_one_call_that_needs_it_keeps_it_longer(wrapper: Wrapper) -> None:
    wrapper.windows(FIRST_WINDOWS - 1)
    wrapper.windows(1, others=True)
    wrapper.windows(FIRST_WINDOWS - 1)
    assert wrapper.is_there


def test_it_waits_twice_as_long_where_other_calls_have_come(wrapper: Wrapper) -> None:
    wrapper.windows(FIRST_WINDOWS)
    wrapper.presence.come_back()
    wrapper.windows(1, others=True)
    assert wrapper.presence._needed == FIRST_WINDOWS
    wrapper.windows(FIRST_WINDOWS)
    assert not wrapper.is_there


def test_absences_grow_and_end(wrapper: Wrapper) -> None:
    for _ in range(2 * MAX_ABSENCES):
        wrapper.windows(FIRST_WINDOWS)
        wrapper.presence.come_back()
    assert len(wrapper.absences) == MAX_ABSENCES
    assert wrapper.absences[0] == 1.0
    assert wrapper.absences == sorted(wrapper.absences)
    assert wrapper.absences[-1] == 600.0
    assert wrapper.is_there


def test_it_stays_without_a_thread_that_would_bring_it_back(wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module._thread, "start_new_thread", refuse)
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
    monkeypatch.setattr(time, "sleep", waited.append)
    wrapper.presence._wait(2.0)
    assert wrapper.is_there
    assert waited == [2.0, 2.0, 2.0]


QUICK = """
from cpulaunch.worker.ledger import presence
presence.WINDOW_SECONDS, presence.FIRST_WINDOWS, presence.FIRST_ABSENCE = 0.02, 2, 0.2
threading = __import__("threading")
threading.Thread(target=threading.Event().wait, daemon=True).start()  # Any other thread.
"""
CALLS = """
import time
nn, plain = torch.nn, torch.nn.Module._wrapped_call_impl
model, x = nn.Linear(16, 4).eval(), torch.randn(2, 16)
expected = plain(model, x)

def wait_until(is_there):
    ends = time.monotonic() + 60
    while (nn.Module.__call__ is not plain) != is_there:
        assert time.monotonic() < ends
        for _ in range(100):
            assert torch.equal(model(x), expected)

with torch.no_grad():
    wait_until(False)
"""
CASES = {
    "back": "    wait_until(True); wait_until(False)",
    "fork": """
    child = os.fork()
    if child == 0:
        os._exit(0 if nn.Module.__call__ is not plain and torch.equal(model(x), expected) else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert nn.Module.__call__ is plain
""",
    "own wrapper": """
    own = lambda self, *args: plain(self, *args)
    nn.Module.__call__ = own
    time.sleep(1)
    assert nn.Module.__call__ is own
    nn.Module.__call__ = plain
    wait_until(True)
""",
    "compiled": """
    pass
compiled, ends = torch.compile(model, backend="eager"), time.monotonic() + 3
wait_until(True)
with torch.no_grad():
    while time.monotonic() < ends:
        compiled(x)
        for _ in range(100):
            model(x)
    for _ in range(10_000):
        compiled(x), model(x)
        assert nn.Module.__call__ is not plain
""",
}


def test_the_wrapper_of_real_calls_leaves_and_comes_back(tmp_path: Path) -> None:
    program = {name: textwrap.dedent(CALLS) + rest for name, rest in CASES.items()}
    cases = {name: case(text, before=QUICK, weights="int8") for name, text in program.items()}
    outcomes = run_cases(cases, tmp_path)
    assert {name: (each.code, each.err) for name, each in outcomes.items()} == dict.fromkeys(CASES, (0, ""))


def test_the_wrapper_stays_under_inference_mode(tmp_path: Path) -> None:
    text = textwrap.dedent(CALLS).replace("+ 60", "+ 2") + "    pass"
    outcomes = run_cases({"inference": case(text, before=QUICK, inference_mode=True)}, tmp_path)
    assert "AssertionError" in outcomes["inference"].err
