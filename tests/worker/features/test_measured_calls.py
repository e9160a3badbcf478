"""Calls run in the fastest mode, by the durations of real calls of modules; durations are made up by a false clock."""

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.features import module_calls as calls  # noqa: E402
from cpulaunch.worker.features.call_modes import CallModes  # noqa: E402
from cpulaunch.worker.fusion.trials import Trials  # noqa: E402
from cpulaunch.worker.graph import cache  # noqa: E402
from cpulaunch.worker.graph.cache import Captures  # noqa: E402
from cpulaunch.worker.ledger.chooser import Chooser  # noqa: E402
from cpulaunch.worker.ledger.runs import LATE_CALLS, TIMED_CALLS  # noqa: E402
from cpulaunch.worker.weights import resident  # noqa: E402
from cpulaunch.worker.weights.entry import ResidentWeight  # noqa: E402
from cpulaunch.worker.weights.resident import ResidentWeights  # noqa: E402
from tests.worker.capturing import PLAIN_CALL, Plugin, close, installed, plain_calls, python_calls  # noqa: E402

pytestmark = pytest.mark.torch


class Clock:
    """A clock on which a call takes as long as its mode says. `ran`: the mode of each measured call."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.ran: list[str] = []


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, float]], Clock]:
    def install(seconds: dict[str, float]) -> Clock:
        clock, run = Clock(seconds), CallModes.run
        monkeypatch.setattr(calls, "_clock", partial(getattr, clock, "now"))  # No Python function, as the true one.

        def timed(self, mode, module, args, kwargs):
            clock.ran.append(mode)
            clock.now += clock.seconds[mode]
            return run(self, mode, module, args, kwargs)

        monkeypatch.setattr(CallModes, "run", timed)
        return clock

    return install


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Plugin]:
    with installed(tmp_path, TorchSettings(graph="onednn"), measured=True) as plugin:
        yield plugin


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()


def choices(plugin: Plugin) -> list[tuple[str, str]]:
    return [(event["module"], event["mode"]) for event in plugin.events("chosen")]


def test_a_graph_that_pays_is_used(tmp_path: Path, clocked) -> None:
    clock = clocked({"graph": 0.5, "plain": 1.0})
    with installed(tmp_path, TorchSettings(graph="onednn"), measured=True) as plugin:
        model = mlp()
        for _ in range(60):
            model(torch.randn(4, 16))
        assert plugin.captured() == ["Sequential"]
        assert choices(plugin) == [("Sequential", "graph")]
        assert plugin.events("chosen")[0]["speedup"] == 2.0
    assert set(clock.ran[-20:]) == {"graph"}


class TakesTimePerRow(nn.Linear):
    def __init__(self, clock: Clock, seconds: float = 1e-3) -> None:
        super().__init__(16, 16)
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds * len(x)
        return super().forward(x)


def test_a_long_call_among_those_that_are_not_measured_ends_their_run(tmp_path: Path, clocked) -> None:
    clock = clocked({"autocast": 9.0, "weights": 9.0, "plain": 0.0})
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True), torch.no_grad():
        model = TakesTimePerRow(clock).eval()
        short, long = torch.randn(1, 16), torch.randn(5000, 16)
        for _ in range(500):
            model(short)
        while clock.ran:  # The next run begins.
            clock.ran.clear()
            model(short)
        for _ in range(100):
            clock.now += 60.0  # Pauses end none.
            model(short)
        assert not clock.ran
        model(long)
        assert not clock.ran
        for _ in range(LATE_CALLS + 1):
            model(short)
        assert clock.ran


def test_of_short_calls_that_are_not_measured_few_are_timed(tmp_path: Path, clocked, monkeypatch) -> None:
    clock = clocked({"autocast": 9.0, "weights": 9.0, "plain": 0.0})
    reads: list[float] = []
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True), torch.no_grad():
        model, x = TakesTimePerRow(clock, 1e-5).eval(), torch.randn(1, 16)
        for _ in range(5000):
            model(x)
        with monkeypatch.context() as patch:
            patch.setattr(calls, "_clock", lambda: reads.append(clock.now) or clock.now)
            clock.ran.clear()
            for _ in range(4000):
                model(x)
        assert len(clock.ran) < 20
        assert 0.9 < len(reads) / 2 / (4000 / TIMED_CALLS) < 1.25


def test_a_change_is_noticed_although_few_short_calls_are_timed(tmp_path: Path, clocked) -> None:
    clock = clocked({"autocast": 9.0, "weights": 9.0, "plain": 0.0})
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True), torch.no_grad():
        model = TakesTimePerRow(clock, 1e-5).eval()
        short, long = torch.randn(1, 16), torch.randn(5000, 16)
        for _ in range(5000):
            model(short)
        while clock.ran:
            clock.ran.clear()
            model(short)
        for _ in range(4 * TIMED_CALLS):
            model(long)
        assert clock.ran


def test_an_interrupt_at_the_end_of_a_call_leaves_no_state_behind(tmp_path: Path, clocked, monkeypatch) -> None:
    clock = clocked({"autocast": 9.0, "weights": 9.0, "plain": 1e-3})
    settings = TorchSettings(precision="bf16", inference_mode=True)
    with installed(tmp_path, settings, measured=True), torch.enable_grad():
        model, times = mlp(), []
        for _ in range(500):
            model(torch.randn(4, 16))
        while clock.ran:
            clock.ran.clear()
            model(torch.randn(4, 16))

        def interrupted() -> float:
            times.append(clock.now)
            if len(times) == 2:
                raise KeyboardInterrupt
            return clock.now

        x = torch.randn(4, 16)
        with monkeypatch.context() as patch:
            patch.setattr(calls, "_clock", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(x)
        assert torch.is_grad_enabled()
        for _ in range(2000):
            model(torch.randn(4, 16))
        assert clock.ran  # Calls are still seen.


@pytest.mark.parametrize("period", [2, 11])
def test_calls_in_the_programs_own_autocast_take_nothing_from_others(tmp_path: Path, clocked, period: int) -> None:
    clock = clocked({"autocast": 1e-3, "weights": 5e-3, "plain": 5e-3})
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True), torch.no_grad():
        model, x, own = mlp(), torch.randn(4, 16), []
        low = torch.bfloat16
        model.register_forward_hook(lambda module, args, result: own.append(result.dtype))
        for number in range(1000):
            with torch.autocast("cpu", enabled=number % period == 0, dtype=low):
                model(x)
    outside = [dtype for number, dtype in enumerate(own) if number % period]
    assert outside.count(low) > 0.9 * len(outside)
    assert clock.now < 1000 * 5e-3


def test_what_measuring_costs_is_counted(tmp_path: Path, clocked, monkeypatch) -> None:
    clock, turn, turns = clocked({"autocast": 9.0, "weights": 9.0, "plain": 1.0}), Chooser.turn, []

    def slow(self, *given):
        clock.now += 0.25
        turns.append(turn(self, *given))
        return turns[-1]

    def slow_add(self, *given, **named):
        clock.now += 0.5
        add(self, *given, **named)

    add = Chooser.add
    monkeypatch.setattr(Chooser, "turn", slow)
    monkeypatch.setattr(Chooser, "add", slow_add)
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True), torch.no_grad():
        model = mlp()
        for _ in range(50):
            model(torch.randn(4, 16))
    plain = [each for each in turns if each.mode == "plain"]
    assert plain
    assert turns[0].entry.ledger.account.measuring == 0.25 * len(plain) + 0.5 * len(turns)


def test_the_time_of_a_capture_is_not_that_of_its_call(plugin: Plugin, clocked, monkeypatch) -> None:
    """Nor is that of another thread's capture."""
    clock, counted = clocked({"graph": 0.5, "plain": 1.0}), []
    monkeypatch.setattr(Chooser, "add", lambda self, turn, seconds, **named: counted.append(seconds))
    run = CallModes.run

    def captures(self, mode, module, args, kwargs):
        clock.now += 60.0
        self.captures.own.seconds += 60.0
        thread = threading.Thread(target=lambda: setattr(self.captures.own, "seconds", 7.0))
        thread.start()
        thread.join()
        return run(self, mode, module, args, kwargs)

    monkeypatch.setattr(CallModes, "run", captures)
    mlp()(torch.randn(4, 16))
    assert counted == [0.5]


def test_a_capture_that_another_thread_waits_for_postpones_no_mode(plugin: Plugin, clocked, monkeypatch) -> None:
    """A mode could be chosen without any sample of plain otherwise."""
    clocked({"graph": 0.5, "plain": 1.0})
    postponed, run = [], CallModes.run
    monkeypatch.setattr(Chooser, "add", lambda self, turn, seconds, *, pending, **named: postponed.append(pending))

    def waits(self, mode, module, args, kwargs):
        def wait() -> None:
            self.captures.own.pending += 1

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        return run(self, mode, module, args, kwargs)

    monkeypatch.setattr(CallModes, "run", waits)
    mlp()(torch.randn(4, 16))
    assert postponed == [False]


@pytest.mark.parametrize("reason", ["its graph is being tried", "it is too early", "its graph is slower"])
def test_a_call_that_has_no_capture_runs_in_the_fastest_other_mode(
    tmp_path: Path, clocked, monkeypatch, reason: str
) -> None:
    """A call in autocast may take many times as long as a plain one where bf16 is emulated."""
    if reason == "it is too early":
        monkeypatch.setattr(cache, "is_too_early", lambda seconds, spent, *, imports: True)
    if reason == "its graph is being tried":
        monkeypatch.setattr(Trials, "outcome", lambda *given: None)
    clock, seen = clocked({"graph": 9.0, "autocast": 9.0, "weights": 9.0, "plain": 1.0}), []
    model, autocast = mlp(), CallModes._in_autocast
    monkeypatch.setattr(
        CallModes, "_in_autocast", lambda *given, **named: (seen.append(1), autocast(*given, **named))[1]
    )
    with installed(tmp_path, TorchSettings(graph="onednn", precision="bf16"), measured=True):
        monkeypatch.setattr(cache, "TOLERATED_SLOWDOWN", 0.0)
        for _ in range(30):
            model(torch.randn(4, 16))
        seen.clear()
        clock.ran.clear()
        for _ in range(100):
            model(torch.randn(4, 16))
    assert clock.ran.count("graph") > 5
    assert len(seen) == clock.ran.count("autocast")


def test_calls_in_every_mode_count_for_a_capture_that_is_too_early(tmp_path: Path, clocked, monkeypatch) -> None:
    monkeypatch.setattr(cache, "is_too_early", lambda seconds, spent, *, imports: spent < 10.0)
    clock = clocked({"graph": 0.5, "plain": 1.0})
    with installed(tmp_path, TorchSettings(graph="onednn"), measured=True) as plugin:
        model = mlp()
        for _ in range(8):
            model(torch.randn(4, 16))
        assert plugin.captured() == []
        assert set(clock.ran) == {"graph", "plain"}
        for _ in range(60):
            model(torch.randn(4, 16))
        assert plugin.captured() == ["Sequential"]
        assert choices(plugin)[-1] == ("Sequential", "graph")


def test_a_slow_graph_is_switched_off_and_its_memory_freed(plugin: Plugin, clocked, monkeypatch) -> None:
    clock = clocked({"graph": 9.0, "plain": 1.0})
    asked, call = [], Captures.call
    monkeypatch.setattr(Captures, "call", lambda *args, **kwargs: (asked.append(args[0]), call(*args, **kwargs))[1])
    model = mlp()
    for _ in range(3000):
        model(torch.randn(4, 16))
    assert plugin.captured() == ["Sequential"]
    assert choices(plugin) == [("Sequential", "plain")]
    assert "calls without captured graphs are faster" in plugin.reasons()
    assert clock.ran.count("graph") == len(asked) < 8
    assert (asked[0].usage.bytes, asked[0].usage.modules) == (0, 0)


def test_a_module_that_cannot_be_captured_is_not_measured_for_long(plugin: Plugin, clocked, monkeypatch) -> None:
    clock = clocked({"graph": 1.0, "plain": 1.0})

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(torch.jit, "trace", fail)
    model = mlp()
    for _ in range(100):
        model(torch.randn(4, 16))
    assert "injected" in plugin.reasons()
    assert clock.ran == ["graph", "graph", "plain"]


@pytest.mark.parametrize(("autocast", "expected"), [(0.5, "autocast"), (1.3, "plain")])
def test_autocast_in_training_is_decided_by_whole_steps(tmp_path: Path, clocked, autocast, expected) -> None:
    clock = clocked({"autocast": 0.1, "plain": 0.1})
    model = nn.Linear(16, 16).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True) as plugin, torch.enable_grad():
        for _ in range(150):
            model(torch.randn(4, 16)).square().mean().backward()
            clock.now += autocast if clock.ran[-1] == "autocast" else 1.0  # The backward pass.
            optimizer.step()
            optimizer.zero_grad()
        assert choices(plugin) == [("Linear", expected)]
        assert "training" in plugin.events("chosen")[0]["signature"]
    assert clock.ran[0] == "autocast"
    assert clock.ran[-1] == expected


def test_evaluation_between_epochs_has_a_choice_of_its_own(tmp_path: Path, clocked) -> None:
    clock = clocked({"autocast": 1.0, "plain": 2.0})
    model = nn.Linear(16, 16)
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True) as plugin:
        for _ in range(4):
            model.train()
            for _ in range(30):
                with torch.enable_grad():
                    model(torch.randn(4, 16)).sum().backward()
                clock.now += 9.0 if clock.ran[-1] == "autocast" else 1.0
            model.eval()
            for _ in range(30):
                model(torch.randn(4, 16))
        assert sorted(choices(plugin)) == [("Linear", "autocast"), ("Linear", "plain")]


class Failing(nn.Module):
    def forward(self, value: Tensor, fails: bool) -> Tensor:
        if fails:
            raise KeyError("expected")
        return value * torch.rand(())


def test_exceptions_reach_the_program_and_do_not_count(tmp_path: Path, clocked) -> None:
    clock = clocked({"autocast": 0.5, "plain": 1.0})
    model = Failing().eval()
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True) as plugin:
        for _ in range(50):
            with pytest.raises(KeyError, match="expected"):
                model(torch.ones(2), True)
        assert choices(plugin) == []
        for _ in range(50):
            model(torch.ones(2), False)
        assert choices(plugin) == [("Failing", "autocast")]
    assert not torch.is_autocast_enabled("cpu")
    assert clock.ran[-1] == "autocast"


def test_every_call_runs_once_with_the_random_numbers_of_the_program(tmp_path: Path) -> None:
    model, value = Failing().eval(), torch.ones(2)
    with installed(tmp_path, TorchSettings(graph="onednn"), measured=True):
        torch.manual_seed(3)
        results = [model(value, False) for _ in range(80)]
        after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.stack(results), torch.stack([model(value, False) for _ in range(80)]))
    assert torch.equal(after, torch.rand(1))


def test_threads_share_a_choice(tmp_path: Path, clocked) -> None:
    clocked({"autocast": 0.5, "plain": 1.0})
    model = nn.Linear(16, 16).eval()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(200):
                    model(torch.randn(4, 16))
        except BaseException as error:  # noqa: BLE001  The test shows it.
            errors.append(error)

    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True) as plugin:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(choices(plugin)) >= 1


def test_a_growing_argument_has_few_signatures(tmp_path: Path, clocked) -> None:
    clocked({"autocast": 1.0, "plain": 2.0})
    model = nn.Identity().eval()
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True) as plugin:
        for length in range(1, 600):
            model(torch.zeros(1, length))
        signatures = [event["signature"] for event in plugin.events("chosen")]
    assert 1 <= len(signatures) <= 8


# The plugin's own cost


@pytest.mark.parametrize("settings", [TorchSettings(graph="onednn"), TorchSettings(precision="bf16"), TorchSettings()])
def test_a_plain_call_costs_one_python_function_and_calls_inside_it_none(tmp_path: Path, clocked, settings) -> None:
    """It asks whether torch.compile is tracing."""
    clocked({"graph": 9.0, "autocast": 9.0, "plain": 1.0})
    model, value = mlp(), torch.randn(4, 16)
    with torch.no_grad():
        model(value)
        before = python_calls(lambda: model(value))
        with installed(tmp_path, settings, measured=True):
            for _ in range(200):
                model(value)
            counts = [python_calls(lambda: model(value)) for _ in range(5)]
    assert min(counts) <= before + 1  # The wrapper takes the place of torch's own functions.


@pytest.mark.parametrize(
    "settings",
    [TorchSettings(graph="onednn", precision="bf16", channels_last=True), TorchSettings(inference_mode=True)],
    ids=["modes and layout", "inference mode"],
)
def test_a_loss_costs_little_whether_it_is_made_once_or_for_each_call(tmp_path: Path, clocked, settings) -> None:
    clocked({"graph": 9e-3, "autocast": 9e-3, "plain": 1e-3})
    value, target, kept = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), nn.CrossEntropyLoss()

    def new() -> Tensor:
        return nn.CrossEntropyLoss()(value, target)

    plain, plain_kept = python_calls(new), python_calls(lambda: kept(value, target))
    with installed(tmp_path, settings, measured=True), torch.enable_grad():
        for _ in range(200):
            close(new(), Plugin.eager(new))
            kept(value, target)
        assert min(python_calls(new) for _ in range(5)) < plain + 25
        assert min(python_calls(lambda: kept(value, target)) for _ in range(5)) <= plain_kept + 5


class Weighted(nn.MSELoss):
    """A loss of a program, whose calls may compute anything."""

    def __init__(self, seen: list[bool]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return super().forward(value, target)


def test_the_first_call_of_a_module_without_weights_that_is_not_torchs_has_all_modes(tmp_path: Path) -> None:
    seen: list[bool] = []
    patched = nn.Module()
    patched.forward = lambda value: seen.append(torch.is_autocast_enabled("cpu"))
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True), torch.enable_grad():
        Weighted(seen)(torch.ones(2), torch.ones(2))
        patched(torch.ones(2))
    assert seen == [True, True]


@pytest.mark.parametrize("where", ["class", "object"])
def test_parts_with_a_call_of_their_own_keep_it(tmp_path: Path, clocked, where: str) -> None:
    clocked({"graph": 9.0, "plain": 1.0})
    seen: list[nn.Module] = []

    class Own(nn.ReLU):
        def _call_impl(self, *args: object, **kwargs: object) -> object:
            seen.append(self)
            return super()._call_impl(*args, **kwargs)

    part = Own() if where == "class" else nn.ReLU()
    if where == "object":
        part._call_impl = lambda value: (seen.append(part), value)[1]
    model = nn.Sequential(nn.Linear(16, 16), part).eval()
    with installed(tmp_path, TorchSettings(), measured=True):
        for number in range(1, 40):
            model(torch.randn(4, 16))
            assert len(seen) == number


def test_the_wrapper_does_not_copy_a_call_that_is_not_torchs() -> None:
    seen: list[nn.Module] = []

    def other(self, *args, **kwargs):
        seen.append(self)
        return PLAIN_CALL(self, *args, **kwargs)

    nn.Module.__call__ = other
    try:
        calls.install(TorchSettings())
        mlp()(torch.randn(4, 16))
    finally:
        nn.Module.__call__ = PLAIN_CALL
    assert [type(module).__name__ for module in seen] == ["Sequential", "Linear", "ReLU", "Linear"]
    with plain_calls():
        assert nn.Module.__call__ is PLAIN_CALL


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value)


@pytest.mark.parametrize(
    ("settings", "training", "expected"),
    [
        (TorchSettings(weights="int8"), False, ("weights", "plain")),
        (TorchSettings(weights="int8"), True, ("plain",)),
        (TorchSettings(weights="int8", release_weights=True), False, ("weights",)),
        (TorchSettings(weights="int8", precision="bf16"), False, ("weights", "autocast", "plain")),
        (TorchSettings(precision="bf16"), False, ("autocast", "weights", "plain")),
        (TorchSettings(precision="bf16", graph="onednn"), False, ("graph", "autocast", "weights", "plain")),
        (TorchSettings(precision="bf16", graph="onednn"), True, ("autocast", "plain")),
        (TorchSettings(precision="fp32"), False, ("plain",)),
    ],
)
def test_the_modes_that_the_settings_allow(settings, training, expected) -> None:
    modes = CallModes(settings, PLAIN_CALL, None)
    with torch.set_grad_enabled(training):
        assert modes.candidates(Wide().train(training)) == expected


def test_a_mode_that_the_first_call_does_not_allow_is_found_later(tmp_path: Path, clocked) -> None:
    """A hook of all modules, for a summary of the model, keeps the first call from being captured."""
    clock = clocked({"graph": 0.5e-3, "plain": 1e-3})
    with installed(tmp_path, TorchSettings(graph="onednn"), measured=True):
        model = mlp()
        hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
        model(torch.randn(4, 16))
        hook.remove()
        for _ in range(1200):
            model(torch.randn(4, 16))
    assert clock.ran[-1] == "graph"


def test_weights_that_the_first_call_makes_become_resident(tmp_path: Path, clocked) -> None:
    clock = clocked({"weights": 0.5e-3, "plain": 1e-3})
    with installed(tmp_path, TorchSettings(weights="int8"), measured=True):
        model = nn.Sequential(nn.LazyLinear(256), nn.ReLU()).eval()
        for _ in range(1200):
            model(torch.randn(4, 256))
    assert clock.ran[-1] == "weights"


def test_making_resident_weights_does_not_count(tmp_path: Path, clocked) -> None:
    clock = clocked({"weights": 0.5, "plain": 1.0})
    model = Wide().eval()
    with installed(tmp_path, TorchSettings(weights="int8"), measured=True) as plugin:
        for _ in range(30):
            model(torch.randn(2, 256))
        assert choices(plugin) == [("Wide", "weights")]
        assert plugin.events("weights")[0]["kinds"] == {"int8": 1}
    assert clock.ran[-1] == "weights"


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_weights_are_packed_as_far_as_the_calls_so_far_pay_for_it(
    tmp_path: Path, clocked, monkeypatch, precision: str | None
) -> None:
    """Here it takes 4 seconds for each layer."""
    clock, make, packed = clocked({"weights": 0.5, "autocast": 0.7, "plain": 1.0}), ResidentWeight.make, []
    monkeypatch.setattr(resident, "_clock", lambda: clock.now)

    def slow(*given: object) -> Tensor:
        clock.now += 4.0
        packed.append(clock.now - 4.0 * len(packed))
        return make(*given)

    monkeypatch.setattr(ResidentWeight, "make", slow)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).eval()
    with installed(tmp_path, TorchSettings(weights="int8", precision=precision), measured=True) as plugin:
        for _ in range(60):
            model(torch.randn(2, 256))
        assert choices(plugin)[-1] == ("Sequential", "weights")
        assert len(plugin.events("accuracy")) == 2
    assert len(packed) == 4
    assert all(seconds > 4.0 * number for number, seconds in enumerate(packed))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_packed_weights_are_freed_where_they_are_slower(tmp_path: Path, clocked, monkeypatch, precision) -> None:
    """In the second minute, as the calls are short."""
    clock, stores = clocked({"weights": 15e-3, "autocast": 15e-3, "plain": 5e-3}), []
    begin = ResidentWeights.__init__
    monkeypatch.setattr(ResidentWeights, "__init__", lambda *given: (stores.append(given[0]), begin(*given))[1])
    model, sizes = Wide().eval(), []
    with installed(tmp_path, TorchSettings(weights="int8", precision=precision), measured=True) as plugin:
        for _ in range(30_000):
            model(torch.randn(2, 256))
            sizes.append(stores[0].bytes)
        assert set(mode for _, mode in choices(plugin)) == {"plain"}
    assert max(sizes) >= 256 * 256
    assert sizes[-1] == 0
    assert sum(before > after for before, after in itertools.pairwise(sizes)) == 1  # They are not made again.
    assert clock.ran.count("weights") < 100


@pytest.mark.parametrize(
    "settings",
    [
        TorchSettings(graph="onednn"),
        TorchSettings(weights="int8"),
        TorchSettings(precision="bf16"),
        TorchSettings(graph="onednn", precision="bf16", weights="bf16"),
    ],
    ids=["graph", "weights", "autocast", "all"],
)
@pytest.mark.parametrize("where", ["module", "part", "every module"])
def test_hooks_added_later_run_in_every_mode(tmp_path: Path, settings, where: str) -> None:
    model, seen = nn.Sequential(Wide(), nn.ReLU()).eval(), []
    with installed(tmp_path, settings) as plugin:
        for _ in range(5):
            model(torch.randn(2, 256))
        assert plugin.captured() or settings.graph == "off"
        if where == "every module":
            hook = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(part))
        else:
            hook = (model if where == "module" else model[0]).register_forward_hook(lambda *_: seen.append(model))
        for number in range(1, 6):
            model(torch.randn(2, 256))
            assert seen.count(model) == number
        hook.remove()
        model(torch.randn(2, 256))
        assert seen.count(model) == 5


@pytest.mark.parametrize(
    "settings",
    [TorchSettings(graph="onednn"), TorchSettings(weights="int8"), TorchSettings(precision="bf16")],
    ids=["graph", "weights", "autocast"],
)
def test_modules_may_swap_their_parameters(tmp_path: Path, settings) -> None:
    model, before = nn.Sequential(Wide(), nn.ReLU()).eval(), torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with installed(tmp_path, settings) as plugin:
            for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):
                model.to(dtype)
                for _ in range(4):
                    value = torch.randn(2, 256, dtype=dtype)
                    torch.testing.assert_close(model(value), plugin.eager(model, value), rtol=0.05, atol=0.05)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


class Decoder(nn.Module):
    """A layer with a cache as in text generation, whose products need one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor, cache: object = None) -> tuple[Tensor, object]:
        cache = Cache() if cache is None else cache
        y = self.linear(x)
        if not hasattr(cache, "first"):
            cache.first = y  # type: ignore[attr-defined]
        return torch.bmm(y[None], cache.first.t()[None])[0], cache


class Cache:
    """Has slots, so that its tensors are not known to the plugin."""

    __slots__ = ("first",)


@pytest.mark.parametrize("given", [False, True])
def test_dtypes_do_not_mix_in_the_objects_of_a_program(tmp_path: Path, clocked, given: bool) -> None:
    clock = clocked({"plain": 4.0, "weights": 2.0, "autocast": 1.0})
    model, x = Decoder().eval(), torch.randn(4, 128)
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True):
        _, cache = model(x, Cache() if given else None)
        for _ in range(40):
            y, cache = model(torch.randn(4, 128), cache)
            assert y.dtype == cache.first.dtype == torch.float32
    assert "autocast" not in clock.ran
    assert clock.ran[-1] == "weights"


def test_a_cache_that_appears_later_ends_autocast(tmp_path: Path, clocked) -> None:
    class Late(Decoder):
        def forward(self, x: Tensor, cache: object = None) -> object:
            return self.linear(x) if cache is None else super().forward(x, cache)

    clock = clocked({"plain": 4.0, "weights": 2.0, "autocast": 1.0})
    model, x, cache = Late().eval(), torch.randn(4, 128), Cache()
    with installed(tmp_path, TorchSettings(precision="bf16"), measured=True):
        for _ in range(20):
            model(x)
        assert clock.ran[-1] == "autocast"
        clock.ran.clear()
        for _ in range(20):
            model(x, cache)
            model(x)
    assert "autocast" not in clock.ran


def test_the_first_results_are_compared_with_plain_ones(tmp_path: Path, clocked) -> None:
    clocked({"plain": 2.0, "weights": 1.0})
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).eval()
    with installed(tmp_path, TorchSettings(weights="int8"), measured=True) as plugin:
        for _ in range(20):
            model(torch.randn(1, 256))
        compared = plugin.events("accuracy")
    assert len(compared) == 2
    assert all(0 < event["error_rms"] < 0.05 for event in compared)


@pytest.mark.parametrize(("autocast", "plain"), [(1e-5, 2e-5), (2e-5, 1e-5)])
def test_most_short_calls_are_not_measured_once_a_mode_is_chosen(tmp_path: Path, clocked, autocast, plain) -> None:
    clock = clocked({"autocast": autocast, "plain": plain, "weights": 1.0})
    model, turns, turn = nn.Linear(16, 16).eval(), [], Chooser.turn
    with (
        installed(tmp_path, TorchSettings(precision="bf16"), measured=True) as plugin,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setattr(Chooser, "turn", lambda *arguments: (turns.append(1), turn(*arguments))[1])
        for _ in range(5000):
            model(torch.randn(4, 16))
        assert choices(plugin) == [("Linear", "autocast" if autocast < plain else "plain")]
    assert len(turns) < 100
    if autocast < plain:
        assert clock.ran.count("autocast") > 4900


def test_calls_under_inference_mode_are_not_measured_either(tmp_path: Path, clocked) -> None:
    clocked({"plain": 1e-5})
    model, value, turns, turn = nn.Linear(16, 16).eval(), torch.randn(4, 16), [], Chooser.turn
    settings = TorchSettings(inference_mode=True)
    with installed(tmp_path, settings, measured=True), pytest.MonkeyPatch.context() as m, torch.enable_grad():
        m.setattr(Chooser, "turn", lambda *arguments: (turns.append(1), turn(*arguments))[1])
        for _ in range(500):
            assert not model(value).requires_grad
        assert len(turns) == 1
        assert torch.is_grad_enabled()
        assert python_calls(lambda: model(value)) < python_calls(lambda: nn.Linear.forward(model, value)) + 10
        gradient = torch.func.grad(lambda given: model(given).sum())(value)
    torch.testing.assert_close(gradient, model.weight.detach().sum(0).expand(4, 16))


def test_gradients_that_a_program_enables_inside_a_call_stay(tmp_path: Path, clocked) -> None:
    """Of a part that is called by itself too, without gradients."""
    clocked({"plain": 1e-5, "graph": 1.0})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

        def forward(self, value: Tensor) -> Tensor:
            with torch.enable_grad():
                value = value.detach().requires_grad_()
                return torch.autograd.grad(self.encoder(value).sum(), value)[0]

    model, value = Model().eval(), torch.randn(4, 16)
    settings = TorchSettings(graph="onednn", inference_mode=True)
    with installed(tmp_path, settings, measured=True), torch.enable_grad():
        for _ in range(100):
            model.encoder(value)
            model(value)
