"""Graphs tried in the helper process: what compiles, what crashes, and how the helper ends."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.worker.fusion import trials as trials_module  # noqa: E402
from cpulaunch.worker.fusion.exclusion import fusible, leave_out  # noqa: E402
from cpulaunch.worker.fusion.portable import PortableGraph, function_of, graph_of, portable  # noqa: E402
from cpulaunch.worker.fusion.search import ExhaustedError  # noqa: E402
from cpulaunch.worker.fusion.trial import Trial  # noqa: E402
from cpulaunch.worker.fusion.trials import Trials  # noqa: E402
from cpulaunch.worker.fusion.wire import describe, value_of  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.ones(2, 16)


def frozen(function: Callable[..., Tensor], *inputs: Tensor) -> PortableGraph:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, *values: Tensor) -> tuple[Tensor]:
            return (function(self.layer(values[0]), *values[1:]),)

    with torch.no_grad():
        return portable(torch.jit.freeze(torch.jit.trace(Module().eval(), inputs, check_trace=False)))


@pytest.fixture(scope="module")
def trials(tmp_path_factory) -> Iterator[Trials]:
    trials = Trials(300.0, folder=str(tmp_path_factory.mktemp("graphs")), wait=True)
    yield trials
    trials.close()


def left_out(trials: Trials, graph: PortableGraph, *inputs: Tensor) -> list[str]:
    """The kinds of the operations that are not fused."""
    outcome = trials.outcome(graph, inputs)
    assert outcome is not None
    assert outcome.refusal is None
    nodes = fusible(graph_of(graph))
    return [nodes[position].kind() for position in sorted(outcome.left_out)]


def test_a_plain_graph_is_fused_completely(trials: Trials) -> None:
    value = torch.randn(4, 16)
    assert left_out(trials, frozen(torch.relu, value), value) == []


DEFECTS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a layer norm without weights": (lambda value: nn.functional.layer_norm(value, (16,)).relu(), "aten::layer_norm"),
    "gelu by tanh": (lambda value: nn.functional.gelu(value, approximate="tanh") * 2, "aten::gelu"),
    "a rounded quotient": (lambda value: torch.div(value, 0.3, rounding_mode="floor") + 1, "aten::div"),
    "rounding to decimals": (lambda value: torch.round(value, decimals=2) + 1, "aten::round"),
    "bounds that are tensors": (lambda value: torch.clamp(value, max=torch.ones(16)) + 1, "aten::clamp"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_only_the_operation_with_the_defect_is_left_out(trials: Trials, name: str) -> None:
    function, kind = DEFECTS[name]
    value = torch.randn(2, 4, 16)
    assert left_out(trials, frozen(function, value), value) == [kind]


def test_integers_are_not_fused(trials: Trials) -> None:
    """T5 computes relative positions: oneDNN Graph would multiply integers by a fraction as integers."""
    value, steps = torch.randn(4, 16), torch.arange(16)
    graph = frozen(lambda value, steps: value + steps * 0.5 + (steps + 3), value, steps)
    assert set(left_out(trials, graph, value, steps)) == {"aten::mul", "aten::add"}


@pytest.mark.parametrize(
    "value",
    [
        *(torch.arange(6).expand(4, 6), torch.ones(3, 1, dtype=torch.bool).expand(3, 5), torch.randn(3, 4).t()),
        *(torch.randn(2, 3, 4)[:, ::2], torch.zeros(0, 4), torch.tensor(7), torch.randn(400).expand(8, 400)),
        torch.arange(1 << 16).expand(4, 1 << 16),
    ],
)
def test_a_described_tensor_has_the_same_shape_strides_and_small_values(value: Tensor) -> None:
    [described] = describe([value])
    other = value_of(described)
    assert (other.dtype, other.shape, other.stride()) == (value.dtype, value.shape, value.stride())
    if "data" in described:
        assert torch.equal(other, value)


def test_a_graph_with_operations_of_another_library_is_not_fused(trials: Trials) -> None:
    with torch.library._scoped_library("cpulaunch_tests", "DEF") as library:
        library.define("doubled(Tensor value) -> Tensor")
        library.impl("doubled", lambda value: value * 2, "CPU")
        value = torch.randn(4, 16)
        graph = frozen(lambda value: torch.ops.cpulaunch_tests.doubled(value).relu(), value)
        assert left_out(trials, graph, value) == ["aten::linear", "aten::relu"]


def test_a_known_graph_is_answered_without_a_helper(trials: Trials) -> None:
    value = torch.randn(5, 16)
    graph = frozen(torch.tanh, value)
    trials.outcome(graph, [value])
    later = Trials(300.0, folder=trials._folder, wait=False)
    assert later.outcome(graph, [value]) == trials.outcome(graph, [value])
    assert later.helper_pid() is None


def test_the_program_does_not_wait(tmp_path: Path) -> None:
    value = torch.randn(6, 16)
    trials = Trials(300.0, folder=str(tmp_path / "graphs"))
    try:
        assert trials.outcome(frozen(torch.tanh, value), [value]) is None
    finally:
        trials.close()


def test_a_graph_that_takes_too_long_is_refused_for_this_process_only(tmp_path: Path) -> None:
    value = torch.randn(6, 16)
    trials = Trials(0.0, folder=str(tmp_path / "graphs"), wait=True)
    try:
        outcome = trials.outcome(frozen(torch.tanh, value), [value])
    finally:
        trials.close()
    assert outcome is not None
    assert not outcome.lasting
    assert "could not be compiled in" in str(outcome.refusal)
    assert not (tmp_path / "graphs" / "outcomes").exists()


def test_a_helper_that_is_killed_is_started_again(tmp_path: Path) -> None:
    value = torch.randn(7, 16)
    trials = Trials(300.0, folder=str(tmp_path / "graphs"))
    graph = frozen(torch.tanh, value)
    assert trials.outcome(graph, [value]) is None
    first = trials.helper_pid()
    assert first is not None
    os.kill(first, signal.SIGKILL)
    trials._wait = True
    try:
        assert trials.outcome(graph, [value]) is not None
        assert trials.helper_pid() != first
    finally:
        trials.close()


@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/interpreter"])
def test_without_a_helper_nothing_is_captured(tmp_path: Path, monkeypatch, executable: str) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    value = torch.randn(7, 16)
    outcome = Trials(300.0, folder=str(tmp_path / "graphs"), wait=True).outcome(frozen(torch.tanh, value), [value])
    assert outcome is not None
    assert not outcome.lasting
    assert "process" in str(outcome.refusal)


def test_a_program_that_is_no_interpreter_is_not_started_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    value = torch.randn(7, 16)
    outcome = Trials(300.0, folder=str(tmp_path / "graphs"), wait=True).outcome(frozen(torch.tanh, value), [value])
    assert outcome is not None
    assert "not run by a Python interpreter" in str(outcome.refusal)


def test_a_worker_with_many_open_files_that_ignores_its_children(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    source, opened = os.open(os.devnull, os.O_RDONLY), []
    value = torch.randn(9, 16)
    trials = Trials(300.0, folder=str(tmp_path / "graphs"), wait=True)
    try:
        opened = [os.dup(source) for _ in range(1100)]
        outcome = trials.outcome(frozen(torch.tanh, value), [value])
        assert outcome is not None
        assert outcome.refusal is None
    finally:
        trials.close()
        signal.signal(signal.SIGCHLD, before)
        for descriptor in (source, *opened):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_user_without_a_home_has_no_folder(monkeypatch) -> None:
    monkeypatch.chdir("/")
    outcome = Trials(300.0, folder="~/.cache/cpulaunch/graphs", wait=True).outcome(frozen(torch.tanh, X), [X])
    assert outcome is not None
    assert "has no home folder" in str(outcome.refusal)
    assert not os.path.exists("/~")


def test_without_a_safe_folder_nothing_is_captured(tmp_path: Path) -> None:
    folder = tmp_path / "graphs"
    folder.mkdir()
    folder.chmod(0o777)
    value = torch.randn(7, 16)
    outcome = Trials(300.0, folder=str(folder), wait=True).outcome(frozen(torch.tanh, value), [value])
    assert outcome is not None
    assert "other users can write" in str(outcome.refusal)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: 7, ("ok", 7)),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), ("failed", "oneDNN Graph crashes (SIGSEGV)")),
        (os.abort, ("failed", "oneDNN Graph crashes (SIGABRT)")),
        (lambda: os._exit(3), ("failed", "the process that compiled it ended without an answer")),
        (lambda: {}["missing"], ("failed", "'missing'")),
    ],
)
def test_a_crash_ends_only_the_process_of_the_attempt(work: Callable[[], object], expected: tuple[str, object]) -> None:
    trial = Trial({"seconds": 300.0}, [], gone=lambda: False)
    assert trial._in_process(work) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGRTMIN])
def test_a_signal_from_outside_says_nothing_about_the_graph(number: int) -> None:
    trial = Trial({"seconds": 300.0}, [], gone=lambda: False)
    with pytest.raises(ExhaustedError, match=f"ended by signal {int(number)}"):
        trial._in_process(lambda: os.kill(os.getpid(), number))


def test_an_attempt_without_end_is_killed() -> None:
    trial = Trial({"seconds": 0.5}, [], gone=lambda: False)
    with pytest.raises(ExhaustedError):
        trial._in_process(lambda: time.sleep(600))


def test_an_attempt_is_killed_when_the_worker_has_ended() -> None:
    trial = Trial({"seconds": 600.0}, [], gone=lambda: True)
    with pytest.raises(ExhaustedError):
        trial._in_process(lambda: time.sleep(600))


WORKER = """
import sys, time, torch
from cpulaunch.worker.fusion.portable import portable
from cpulaunch.worker.fusion.search import ExhaustedError
from cpulaunch.worker.fusion.trial import Trial
from cpulaunch.worker.fusion.trials import Trials

value = torch.randn(6, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()).eval()
with torch.no_grad():
    graph = portable(torch.jit.freeze(torch.jit.trace(model, value)))
trials = Trials(300.0, folder=sys.argv[1])
trials.outcome(graph, [value])
print(trials.helper_pid(), flush=True)
time.sleep(600)
"""


def test_the_helper_ends_with_its_worker(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WORKER, str(tmp_path / "graphs")], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    with worker.stdout:
        helper = int(worker.stdout.readline())
    worker.kill()
    worker.wait()
    while is_running(helper):  # Ends by the time limit of the test run if the helper does not.
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_the_fingerprint_depends_on_shapes_and_values_of_integers() -> None:
    value, other = torch.randn(4, 16), torch.randn(5, 16)
    index = torch.tensor([0, 3, 5])

    def key(inputs: list[Tensor], chosen: Tensor) -> str:
        graph = frozen(lambda value: value[:, chosen], *inputs)
        return trials_module.fingerprint(graph, trials_module.describe((*inputs, *graph.constants)))

    assert key([value], index) == key([torch.zeros(4, 16)], index.clone())
    assert (
        len(
            {
                key([value], index),
                key([other], index),
                key([value], index + 1),
                key([value.t().contiguous().t()], index),
            }
        )
        == 4
    )


@pytest.mark.parametrize("seed", range(6))
def test_leaving_operations_out_changes_no_value(seed: int) -> None:
    torch.manual_seed(seed)
    operations = [torch.relu, torch.tanh, lambda value: value + 1, lambda value: value * value, torch.abs]
    chosen = [operations[int(index)] for index in torch.randint(len(operations), (8,))]

    def function(value: Tensor) -> Tensor:
        for operation in chosen:
            value = operation(value)
        return value.softmax(-1)

    value = torch.randn(4, 16)
    graph = frozen(function, value)
    expected = function_of(graph_of(graph))(value)[0]
    changed = graph_of(graph)
    count = len(fusible(changed))
    leave_out(changed, [index for index in range(count) if torch.rand(()) < 0.5])
    run = function_of(changed)
    for _ in range(3):
        torch.testing.assert_close(run(value)[0], expected)


def test_an_operation_in_place_does_not_change_a_constant() -> None:
    """TorchScript replaces x + 0 by x, so that the later addition would change the constant x."""
    table = torch.arange(16)

    def function(value: Tensor) -> Tensor:
        positions = table + torch.zeros((), dtype=torch.int64)
        positions += 1
        return value + positions

    value = torch.randn(4, 16)
    run = function_of(graph_of(frozen(function, value)))
    first = run(value)[0]
    for _ in range(3):
        torch.testing.assert_close(run(value)[0], first)
