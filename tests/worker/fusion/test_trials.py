"""Graphs tried in the helper process: what compiles, what crashes, and how the helper ends."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.worker.fusion import trial as trial_module  # noqa: E402
from cpulaunch.worker.fusion import trials as trials_module  # noqa: E402
from cpulaunch.worker.fusion.exclusion import PRODUCTS, fusible, leave_out, observed_kinds  # noqa: E402
from cpulaunch.worker.fusion.helper import LEAST_PRIORITY, LOW_PRIORITY, tried, wanted_and_had  # noqa: E402
from cpulaunch.worker.fusion.helper_process import (  # noqa: E402
    HelperEndedError,
    HelperProcess,
    HelperStarvedError,
    environment,
)
from cpulaunch.worker.fusion.math_settings import apply_math_settings, math_settings  # noqa: E402
from cpulaunch.worker.fusion.outcomes import add_outcomes, read_outcomes  # noqa: E402
from cpulaunch.worker.fusion.portable import PortableGraph, function_of, graph_of, portable  # noqa: E402
from cpulaunch.worker.fusion.search import ExhaustedError, TrialOutcome  # noqa: E402
from cpulaunch.worker.fusion.trial import Trial  # noqa: E402
from cpulaunch.worker.fusion.trials import Trials, fingerprint  # noqa: E402
from cpulaunch.worker.fusion.values import describe, value_of  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.ones(2, 16)


SHOW_FOLDERS = """
import os, sys, types
os.chdir(os.environ.get("GO", "."))
from cpulaunch.worker.fusion.helper_process import module_folders
for name in sys.argv[1:]:
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].__file__ = os.path.join(name, "torch", "__init__.py")
own = os.path.dirname(os.path.realpath(__file__))
print(own in sys.path, own in module_folders(), *module_folders(), sep="\\n")
"""


@pytest.mark.parametrize("words", [("-m", "show"), ("show.py",), (".",)])
def test_the_helper_finds_no_module_in_the_folder_of_the_program(tmp_path: Path, words: tuple[str, ...]) -> None:
    """As in /tmp, where anyone may put one of any name; but torch, where the program has found it there."""
    for name in ("show.py", "__main__.py"):
        (tmp_path / name).write_text(SHOW_FOLDERS)
    package = str(Path(trials_module.__file__).parents[3])

    def shown(*more: str, **variables: str) -> list[str]:
        env = os.environ | {"PYTHONPATH": package, "PYTHONSAFEPATH": ""} | variables
        command = [sys.executable, *words, *more]
        return subprocess.check_output(command, cwd=tmp_path, env=env, text=True, timeout=60).splitlines()

    folders = shown()
    assert folders[:2] == ["True", "False"]
    assert {package, str(Path(torch.__file__).parents[1])} <= {*folders[2:]}
    assert shown(GO="/")[:2] == ["True", "False"]
    assert shown(str(tmp_path))[:2] == ["True", "True"]
    assert shown(PYTHONPATH=f"{tmp_path}:{package}")[:2] == ["True", "True"]


def frozen(function: Callable[..., Tensor], *inputs: Tensor) -> PortableGraph:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            nn.init.ones_(self.layer.bias)  # So small that its values count.

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


@pytest.mark.parametrize("rows", [5, 6, 7])
def test_a_graph_that_writes_beyond_a_block_of_memory_is_not_fused_as_a_whole(trials: Trials, rows: int) -> None:
    """One row less than columns: what is written beyond the block is hardly ever noticed without a check."""

    def attended(value: Tensor, other: Tensor) -> tuple[Tensor]:
        return ((value @ other.T @ other) + torch.log1p(other) + other,)

    value, other = torch.rand(rows, 8), torch.rand(rows, 8)
    graph = portable(torch.jit.trace(attended, (value, other), check_trace=False))
    assert left_out(trials, graph, value, other) == ["aten::add", "aten::add"]


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


@pytest.mark.slow
def test_a_graph_that_could_not_be_tried_in_time_is_tried_again(tmp_path: Path) -> None:
    value = torch.randn(6, 16)
    folder = str(tmp_path / "graphs")
    hurried, patient = Trials(0.0, folder=folder, wait=True), Trials(300.0, folder=folder, wait=True)
    try:
        outcome = hurried.outcome(frozen(torch.tanh, value), [value])
        assert outcome is not None
        assert "could not be compiled in" in str(outcome.refusal)
        again = patient.outcome(frozen(torch.tanh, value), [value])
    finally:
        hurried.close()
        patient.close()
    assert again is not None
    assert again.refusal is None


def busy(seconds: float) -> Callable[[object], object]:
    """What an attempt does instead of compiling: it computes for so long."""

    def compute(*_: object) -> float:
        start = time.thread_time()
        while time.thread_time() - start < seconds:
            pass
        return seconds

    return compute


def test_a_trial_that_the_time_limit_has_cut_is_remembered_for_starts_with_the_same_limit(
    tmp_path: Path, monkeypatch
) -> None:
    value = torch.randn(6, 16)
    graph = frozen(torch.tanh, value)
    described = describe((value, *graph.constants))
    key = fingerprint(graph, described)
    fields = {"key": key, "text": graph.text, "inputs": 1, "left_out": [], "threads": 1, "math": math_settings()}
    monkeypatch.setattr(trial_module, "compile_and_run", busy(600.0))
    monkeypatch.setattr(trial_module, "IDLE_FACTOR", 20)
    cut = tried(str(tmp_path), fields | {"seconds": 0.1}, described)
    assert cut.cut_after >= 0.1
    attempts: list[object] = []
    monkeypatch.setattr(trial_module, "compile_and_run", lambda *given: attempts.append(given))
    assert tried(str(tmp_path), fields | {"seconds": 0.1}, described).refusal == cut.refusal
    later = Trials(0.1, folder=str(tmp_path), wait=False)
    assert later.outcome(graph, [value]) is not None
    assert later.helper_pid() is None
    monkeypatch.setattr(trial_module, "compile_and_run", busy(0.1))
    longer = tried(str(tmp_path), fields | {"seconds": 1000.0}, described)
    assert (longer.refusal, longer.cut_after) == (None, 0.0)
    assert read_outcomes(str(tmp_path))[key] == longer


@pytest.mark.slow
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


def test_its_low_priority_counts_against_the_worker(tmp_path: Path) -> None:
    """In another session it would have half of a CPU that a thread of the worker computes on, whatever its priority."""
    helper = HelperProcess(str(tmp_path))
    deadline = time.monotonic() + 30
    pids: list[int] = []
    while not any(os.sched_getscheduler(each) == os.SCHED_IDLE for each in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # No event marks when another process has changed its own priority.
        pids = [each.pid for each in psutil.Process(helper.pid).children()]
    (pid,) = pids
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) != os.getpgid(0)
    group = Path("/proc/self/autogroup")
    if group.exists():  # Empty in a session in which setsid(2) was never called.
        assert Path(f"/proc/{pid}/autogroup").read_text() == group.read_text()
    helper.close()
    wait_for_end(helper.pid)


@pytest.fixture
def busy_cpu() -> Iterator[None]:
    """This thread, and what it starts, share one CPU with a program that never waits."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    hog.kill()
    hog.wait()
    os.sched_setaffinity(0, before)


def request_line(key: str, *values: object) -> bytes:
    """A request for a trial, as far as a helper reads it before it builds the graph."""
    return json.dumps({"key": key, "seconds": 300.0, "values": values}).encode() + b"\n"


def test_a_helper_that_finds_no_idle_cpu_says_so(tmp_path: Path, busy_cpu: None) -> None:
    helper = HelperProcess(str(tmp_path), patience=0.4)
    helper.send(request_line("a" * 64))  # For which it imports torch.
    with pytest.raises(HelperStarvedError):
        helper.receive(60.0)
    helper.close()
    wait_for_end(helper.pid)


def test_only_processes_with_work_to_do_want_a_cpu() -> None:
    programs = {
        "waits": "input()",
        "works": "while True: pass",
        "waits for a child": "input() if os.fork() else input()",
    }
    started = {
        name: subprocess.Popen([sys.executable, "-c", f"import os\n{program}"], stdin=subprocess.PIPE)
        for name, program in programs.items()
    }
    for name, process in started.items():
        while wanted_and_had(process.pid)[0] != (name != "waits"):
            time.sleep(0.01)  # No event marks when another process begins to wait.
    _, before = wanted_and_had(started["works"].pid)
    while wanted_and_had(started["works"].pid)[1] < before + 0.1:
        time.sleep(0.01)  # No event marks that another process has worked.
    for process in started.values():
        process.communicate() if process is not started["works"] else process.kill()
        process.wait()


def test_where_no_cpu_is_idle_a_second_helper_takes_its_share(tmp_path: Path, busy_cpu: None, monkeypatch) -> None:
    monkeypatch.setattr(trials_module, "PATIENCE_SECONDS", (0.4,))
    trials = Trials(300.0, folder=str(tmp_path), wait=False)
    graph = frozen(torch.tanh, X)
    found: list[psutil.Process] = []
    low = min(os.nice(0) + LOW_PRIORITY, LEAST_PRIORITY)
    while not any(each.nice() == low and os.sched_getscheduler(each.pid) == os.SCHED_OTHER for each in found):
        assert trials.outcome(graph, [X]) is None
        time.sleep(0.05)  # No event marks that the first helper has given up.
        pid = trials.helper_pid()
        found = [] if pid is None else psutil.Process(pid).children()
    assert [os.sched_getscheduler(each.pid) for each in found] == [os.SCHED_OTHER]
    trials.close()


def test_a_program_that_asks_for_a_graph_again_waits_for_idle_cpus_for_another_time(
    tmp_path: Path, busy_cpu: None, monkeypatch
) -> None:
    """A shorter one: one that never runs for long would never have it. After some starts in vain it costs no more."""
    monkeypatch.setattr(trials_module, "PATIENCE_SECONDS", (600.0, 0.4, 600.0))
    graph, seen, now = frozen(torch.tanh, X), [], time.time()
    for later, expected in ((0, os.SCHED_IDLE), (5, os.SCHED_OTHER), (1000, os.SCHED_IDLE), (2000, os.SCHED_IDLE)):
        monkeypatch.setattr(trials_module, "STARTED", now + later)  # That of this process, and of later ones.
        trials, policies = Trials(300.0, folder=str(tmp_path), wait=False), []
        while expected not in policies:
            assert trials.outcome(graph, [X]) is None
            policies += policies_of_workers_of(trials.helper_pid())
            time.sleep(0.01)  # No event marks when another process has changed its own priority, or has given up.
        seen.append((trials._patience, [*dict.fromkeys(policies)]))
        trials.close()
    idle = [os.SCHED_IDLE]
    assert seen == [(600.0, idle), (0.0, [*idle, os.SCHED_OTHER]), (600.0, idle), (600.0, idle)]


def test_a_forked_process_waits_for_idle_cpus_as_one_that_is_started(tmp_path: Path, monkeypatch) -> None:
    """As the workers of a server, which may be replaced often, whatever became of their parent's helper."""
    now = time.time()
    monkeypatch.setattr(trials_module, "STARTED", now)
    monkeypatch.setattr(trials_module, "time", SimpleNamespace(time=lambda: now + 100))
    trials = Trials(300.0, folder=str(tmp_path), wait=False)
    graph = frozen(torch.tanh, X)
    assert trials.outcome(graph, [X]) is None
    assert trials._patience == trials_module.PATIENCE_SECONDS[0]
    trials._patience = 0.0
    trials.after_fork()
    assert trials.outcome(graph, [X]) is None
    assert trials._patience == trials_module.PATIENCE_SECONDS[1]
    trials.close()


def policies_of_workers_of(helper: int | None) -> list[int]:
    """The scheduling policies of the helper's children that have chosen their priority; none once it has ended."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        found = [(os.sched_getscheduler(each.pid), each.nice()) for each in psutil.Process(helper).children()]
        return [policy for policy, nice in found if policy == os.SCHED_IDLE or nice > os.nice(0)]
    return []


def test_a_descriptor_that_the_program_has_replaced_stays_open(tmp_path: Path) -> None:
    """As daemons do, which close all descriptors."""
    helper = HelperProcess(str(tmp_path))
    assert helper._pidfd is not None
    with open(os.devnull) as file:
        os.dup2(file.fileno(), helper._pidfd)
        descriptor = helper._pidfd
        helper.close()
        os.close(descriptor)
    wait_for_end(helper.pid)


def test_a_socket_that_the_program_has_closed_is_no_longer_used(tmp_path: Path) -> None:
    """Neither written to, nor read, nor closed: its number may be that of the program's own connection."""
    helper = HelperProcess(str(tmp_path))
    first, second = socket.socketpair()
    with first, second:
        assert helper._pidfd is not None
        for descriptor in (helper._socket.fileno(), helper._pidfd):
            os.dup2(first.fileno(), descriptor)
        second.send(b"of the program")
        descriptors = [helper._socket.fileno(), helper._pidfd]
        with pytest.raises(HelperEndedError):
            helper.receive(0.0)
        helper.close()
        assert socket.socket(fileno=descriptors[0]).recv(100) == b"of the program"
        os.close(descriptors[1])
        second.setblocking(False)
        with pytest.raises(BlockingIOError):
            second.recv(1)  # No request was written to it.
    wait_for_end(helper.pid)


def test_systems_without_locks_and_limits_import_this_too() -> None:
    """Windows, on which `--graph inductor` works."""
    code = "import sys; sys.modules.update(fcntl=None, resource=None); import cpulaunch.worker.graph.engines"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


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
        (lambda: {}["missing"], ("failed", "'missing'")),
    ],
)
def test_a_crash_ends_only_the_process_of_the_attempt(work: Callable[[], object], expected: tuple[str, object]) -> None:
    trial = Trial({"seconds": 300.0}, [])
    assert trial._in_process(work) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGRTMIN])
def test_a_signal_from_outside_says_nothing_about_the_graph(number: int) -> None:
    trial = Trial({"seconds": 300.0}, [])
    with pytest.raises(ExhaustedError, match=f"ended by signal {int(number)}"):
        trial._in_process(lambda: os.kill(os.getpid(), number))


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: bytearray(1 << 60),
        lambda: os._exit(1),  # As OpenMP runtimes do that cannot start their threads.
    ],
)
def test_a_lack_of_resources_says_nothing_about_the_graph(work: Callable[[], object]) -> None:
    trial = Trial({"seconds": 300.0}, [])
    with pytest.raises(ExhaustedError) as caught:
        trial._in_process(work)
    assert not caught.value.lasting


def test_a_process_that_cannot_be_forked_says_nothing_about_the_graph(monkeypatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(ExhaustedError, match="no more processes"):
        Trial({"seconds": 300.0}, [])._in_process(lambda: 7)


def test_what_another_instance_has_found_meanwhile_is_not_tried_again(tmp_path: Path) -> None:
    key, found = "a" * 64, TrialOutcome(left_out=frozenset({3}))
    add_outcomes(str(tmp_path), {key: found})
    assert tried(str(tmp_path), {"key": key, "seconds": 300.0}, []) == found


def test_a_helper_that_need_not_try_a_graph_imports_no_torch(tmp_path: Path) -> None:
    key, found = "a" * 64, TrialOutcome(left_out=frozenset({3}))
    add_outcomes(str(tmp_path), {key: found})
    helper = HelperProcess(str(tmp_path))
    try:
        helper.send(request_line(key))
        assert helper.receive(None) == [(key, found)]
        [child] = psutil.Process(helper.pid).children()
        maps = Path(f"/proc/{child.pid}/maps")
        assert "libtorch" not in maps.read_text()
        huge = {"dtype": "float32", "shape": [1 << 50], "strides": [1]}
        helper.send(request_line("b" * 64, huge))
        [(_, outcome)] = helper.receive(None)
        assert "too little memory" in str(outcome.refusal)
        assert "libtorch" in maps.read_text()
    finally:
        helper.close()


def test_instances_learn_from_each_other(tmp_path: Path) -> None:
    value = torch.randn(8, 16)
    graph = frozen(torch.tanh, value)
    first, second = (Trials(300.0, folder=str(tmp_path / "graphs"), wait=wait) for wait in (True, False))
    try:
        assert second.outcome(graph, [value]) is None
        outcome = first.outcome(graph, [value])
        second._helper = None if second._helper is None else second._helper.close()
        second._load()
        assert outcome in second._outcomes.values()
    finally:
        first.close()
        second.close()


def test_no_call_waits_for_a_compilation_that_takes_too_long(tmp_path: Path) -> None:
    value = torch.randn(8, 16)
    graph = frozen(torch.tanh, value)
    key = fingerprint(graph, describe((value, *graph.constants)))
    add_outcomes(str(tmp_path / "graphs"), {key: TrialOutcome(seconds=10.1)})
    impatient, patient = (Trials(seconds, folder=str(tmp_path / "graphs")) for seconds in (60.0, 61.0))
    refused, accepted = impatient.outcome(graph, [value]), patient.outcome(graph, [value])
    assert refused is not None
    assert accepted is not None
    assert refused.refusal == "a call would wait 10 s for its compilation; --graph-budget gives it 10 s"
    assert (accepted.refusal, accepted.seconds) == (None, 10.1)


def test_the_helper_reports_the_processor_time_of_a_compilation(tmp_path: Path, monkeypatch) -> None:
    """Not the time in which it waits for CPUs that other programs use."""

    def slow(graph: object) -> object:
        start = time.thread_time()
        while time.thread_time() - start < 0.2:
            pass
        time.sleep(1.0)
        return original(graph)

    original = trial_module.fusible_function_of
    monkeypatch.setattr(trial_module, "fusible_function_of", slow)
    value = torch.randn(8, 16)
    graph = frozen(torch.tanh, value)
    fields = {"text": graph.text, "inputs": 1, "left_out": [], "threads": 1, "math": math_settings(), "seconds": 300.0}
    outcome = Trial(fields, describe((value, *graph.constants))).outcome()
    assert outcome.refusal is None
    assert 0.2 <= outcome.seconds < 1.0


def test_an_attempt_without_end_is_killed() -> None:
    trial = Trial({"seconds": 0.5}, [])
    with pytest.raises(ExhaustedError):
        trial._in_process(lambda: time.sleep(600))


def test_all_processes_of_the_helper_end_with_its_worker_whatever_they_do(tmp_path: Path) -> None:
    """They import torch, wait for a claim, or compile: here the third."""
    worker, helper = started(tmp_path, "time.sleep(600)")
    with worker:
        processes = {helper}
        while len(processes) < 3:
            processes = {helper, *(child.pid for child in psutil.Process(helper).children(recursive=True))}
            time.sleep(0.01)
        worker.kill()
    for process in processes:
        wait_for_end(process)


WORKER = """
import os, signal, sys, time, torch
from cpulaunch.worker.fusion.portable import portable
from cpulaunch.worker.fusion.trials import Trials

value = torch.randn(6, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()).eval()
with torch.no_grad():
    graph = portable(torch.jit.freeze(torch.jit.trace(model, value)))
trials = Trials(300.0, folder=sys.argv[1])
trials.outcome(graph, [value])
print(trials.helper_pid(), flush=True)
"""


def started(tmp_path: Path, rest: str) -> tuple[subprocess.Popen[str], int]:
    """A worker that does the rest after it has started a helper, and the helper's process id."""
    command = [sys.executable, "-W", "ignore", "-c", WORKER + rest, str(tmp_path / "graphs")]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    return worker, int(worker.stdout.readline())


def wait_for_end(helper: int) -> None:
    while is_running(helper):  # Ends by the time limit of the test run if the helper does not.
        time.sleep(0.05)


def test_the_helper_ends_with_its_worker(tmp_path: Path) -> None:
    worker, helper = started(tmp_path, "time.sleep(600)")
    with worker:
        worker.kill()
    wait_for_end(helper)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the end of a process is seen by its pidfd")
def test_the_helper_ends_although_a_child_of_the_worker_has_inherited_the_socket(tmp_path: Path) -> None:
    rest = "child = os.fork() or time.sleep(600)\nprint(child, flush=True)\ntime.sleep(600)"
    worker, helper = started(tmp_path, rest)
    with worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        worker.kill()
        try:
            wait_for_end(helper)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_helper_ends_with_its_worker(tmp_path: Path) -> None:
    worker, helper = started(tmp_path, "sys.stdin.read()")
    os.kill(helper, signal.SIGSTOP)
    with worker:
        pass
    wait_for_end(helper)


def test_the_helper_is_no_child_of_its_worker(tmp_path: Path) -> None:
    rest = """
import psutil
print([process.pid for process in psutil.Process().children(recursive=True)], flush=True)
try:
    print(os.wait(), flush=True)
except ChildProcessError:
    print("no children", flush=True)
sys.stdin.read()
"""
    worker, helper = started(tmp_path, rest)
    with worker:
        assert worker.stdout is not None
        assert [worker.stdout.readline() for _ in range(2)] == ["[]\n", "no children\n"]
        assert is_running(helper)
    wait_for_end(helper)


def test_the_helper_ends_first_where_memory_runs_out_and_shows_no_paths(tmp_path: Path) -> None:
    worker, helper = started(tmp_path, "sys.stdin.read()")
    proc = Path(f"/proc/{helper}")
    with worker:
        while (proc / "oom_score_adj").read_text().strip() != "1000":
            time.sleep(0.05)
        assert str(tmp_path) not in (proc / "cmdline").read_text()
        assert "site-packages" not in (proc / "cmdline").read_text()


def test_a_forked_process_does_not_wait_for_a_lock_of_its_parent(tmp_path: Path) -> None:
    rest = """
os.register_at_fork(after_in_child=trials.after_fork)
trials._lock.acquire()
child = os.fork()
if not child:
    trials.outcome(graph, [value])
    print(trials.helper_pid(), flush=True)
    trials.close()
    os._exit(0)
os.waitpid(child, 0)
print(trials.helper_pid())
"""
    worker, helper = started(tmp_path, rest)
    with worker:
        assert worker.stdout is not None
        own, parents = (int(worker.stdout.readline()) for _ in range(2))
        assert own != helper == parents


def test_the_helper_gets_what_torch_needs_and_no_secrets() -> None:
    needed = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "OMP_NUM_THREADS": "4", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    given = environment({**needed, "AWS_SECRET": "x", "LD_BIND_NOW": "1", "CPULAUNCH_WORKER": "{}", "PYTHONPATH": "/x"})
    assert needed.items() <= given.items()
    assert not {"AWS_SECRET", "LD_BIND_NOW", "CPULAUNCH_WORKER", "PYTHONPATH"} & set(given)
    assert given["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    preloaded = environment({"LD_PRELOAD": "/lib/libiomp5.so:/a/libjemalloc.so.2 libtcmalloc_minimal.so.4 b.so"})[
        "LD_PRELOAD"
    ]
    assert preloaded.split(":")[1:] == ["/lib/libiomp5.so", "b.so"]
    assert environment({"GLIBC_TUNABLES": "a=1:b::"})["GLIBC_TUNABLES"] == "a=1:glibc.malloc.check=3"


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


def test_the_fingerprint_depends_on_small_constants_and_settings_of_torch() -> None:
    value = torch.randn(4, 16)

    def key(bound: float = 1.0) -> str:
        graph = frozen(lambda value: torch.maximum(value, torch.full((1,), bound)), value)
        return trials_module.fingerprint(graph, describe((value, *graph.constants)))

    keys, threads, before = [key(), key(2.0)], torch.get_num_threads(), math_settings()
    try:
        torch.set_num_threads(threads + 1)
        keys.append(key())
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("medium")
        keys.append(key())
        apply_math_settings(before)
        torch.backends.mkldnn.enabled = False
        keys.append(key())
        apply_math_settings(before)
        assert key() == keys[0]
    finally:
        torch.set_num_threads(threads)
        apply_math_settings(before)
    assert len(set(keys)) == 5


def test_the_fingerprint_depends_on_how_torch_was_built(monkeypatch) -> None:
    """Distributions build the same version with another oneDNN."""
    graph = frozen(torch.tanh, X)
    described = describe((X, *graph.constants))
    before = trials_module.fingerprint(graph, described)
    monkeypatch.setattr(torch.__config__, "show", lambda: "Intel(R) MKL-DNN v3.8.0")
    assert trials_module.fingerprint(graph, described) != before


def test_settings_of_torch_are_those_of_the_worker() -> None:
    before = math_settings()
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.mkldnn.deterministic = True
        wanted = math_settings()
        apply_math_settings(before)
        assert math_settings() == before != wanted
        apply_math_settings(wanted)
        assert math_settings() == wanted
    finally:
        apply_math_settings(before)


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


def test_a_graph_of_constants_alone() -> None:
    run = function_of(graph_of(frozen(lambda value: torch.arange(16), X)))
    for _ in range(3):
        assert torch.equal(run(X)[0], torch.arange(16))


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


class Multiplied(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value * 2.5


def test_results_that_torchscript_has_made_numbers_are_tensors() -> None:
    graph = torch.jit.freeze(torch.jit.trace(nn.Sequential(Multiplied()).eval(), (X,))).graph.copy()
    (product,) = graph.outputs()
    number = next(node for node in graph.findAllNodes("prim::Constant") if node.output().toIValue() == 2.5).output()
    results = graph.create("prim::TupleConstruct", [number, product], 1)
    results.output().setType(torch._C.TupleType([number.type(), product.type()]))
    graph.appendNode(results)
    graph.eraseOutput(0)
    graph.registerOutput(results.output())
    found = function_of(graph_of(portable(SimpleNamespace(graph=graph))))(X)
    assert [float(each.max()) for each in found] == [2.5, 2.5]


def test_operations_in_the_place_of_one_that_fails_are_left_out_together(monkeypatch) -> None:
    """Of other shapes, as in the stages of a vision model: each would take as many attempts as the first."""

    def refused(changed: object) -> object:
        if any(operands(node) == ("aten::add", "aten::mul") for node in fusible(changed)):
            raise RuntimeError("no kernel")
        return original(changed)

    def operands(node: torch._C.Node) -> tuple[str, str]:
        return node.kind(), node.inputsAt(0).node().kind()

    def stages(value: Tensor) -> Tensor:
        for columns in (16, 8, 4, 2):
            value = torch.exp(torch.tanh(value[:, :columns]) * 3 + value[:, :columns])
        return value

    original = trial_module.fusible_function_of
    monkeypatch.setattr(trial_module, "fusible_function_of", refused)
    value = torch.randn(8, 16)
    graph = frozen(stages, value)
    fields = {"text": graph.text, "inputs": 1, "left_out": [], "threads": 1, "math": math_settings(), "seconds": 300.0}
    trial = Trial(fields, describe((value, *graph.constants)))
    outcome = trial.outcome()
    operations = fusible(graph_of(graph))
    expected = {index for index, node in enumerate(operations) if operands(node) == ("aten::add", "aten::mul")}
    assert outcome.refusal is None
    assert (outcome.left_out, len(expected)) == (expected, 4)
    assert trial._attempts <= 9  # 18 to find each of them.


def test_products_are_left_out_one_by_one() -> None:
    """They take most of the time: one that cannot be fused says little about the others."""
    value = torch.randn(8, 16)
    graph = frozen(lambda x: torch.tanh(x @ x.mT @ x) + torch.tanh(x @ x.mT) @ x, value)
    with torch.no_grad():
        seen = observed_kinds(graph, [value])
    kinds = [node.kind() for node in fusible(graph_of(graph))]
    products = [text for kind, text in zip(kinds, seen["operands"], strict=True) if kind in PRODUCTS]
    others = [text for kind, text in zip(kinds, seen["operands"], strict=True) if kind == "aten::tanh"]
    assert (len(products), len(set(products))) == (4, 4)
    assert (len(others), len(set(others))) == (2, 1)
