"""Resident weights: right while the program changes, replaces, saves, trains or traces what it likes."""

import copy
import io
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.weights import functions  # noqa: E402
from cpulaunch.worker.weights import resident as resident_weights  # noqa: E402
from cpulaunch.worker.weights.release import release  # noqa: E402
from cpulaunch.worker.weights.resident import ResidentWeights, residents  # noqa: E402

pytestmark = pytest.mark.torch

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "int8": 2e-2, "int4": 0.12}
KINDS = tuple(TOLERANCES)
WIDTH = 256


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def store(kind: str = "int8", limit: int | None = None, *, release: bool = False) -> ResidentWeights:
    return ResidentWeights(kind, TorchSettings(graph_memory_bytes=limit, release_weights=release))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False)).eval()


def call(weights: ResidentWeights, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad(), weights.active(module):
        return module(*args, **kwargs)


def plain(module: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        return module(*args)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def near(weights: ResidentWeights, module: nn.Module, x: Tensor, *, calls: int = 4) -> None:
    """Raises: AssertionError unless all calls agree with torch's own within the type's precision."""
    for _ in range(calls):
        got, expected = call(weights, module, x), plain(module, x)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert error(got, expected) <= 2 * TOLERANCES[weights.kind]


def forms(weights: ResidentWeights) -> int:
    return sum(entry is not None and entry.form is not None for entry in weights._weights.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(1, WIDTH), (WIDTH,), (3, WIDTH), (1, 1, WIDTH), (2, 9, WIDTH), (64, WIDTH), (0, WIDTH)]
)
def test_products_agree_with_torch(kind: str, shape: tuple[int, ...]) -> None:
    weights, module = store(kind), model()
    call(weights, module, torch.randn(1, WIDTH))
    call(weights, module, torch.randn(1, WIDTH))
    x = torch.randn(*shape)
    got, expected = call(weights, module, x), plain(module, x)
    assert got.shape == expected.shape
    assert not got.numel() or error(got, expected) <= 2 * TOLERANCES[kind]
    assert forms(weights) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_in_bf16_stays_in_bf16(kind: str) -> None:
    near(store(kind), model().to(torch.bfloat16), torch.randn(1, WIDTH, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 40])
def test_autocast_keeps_its_dtypes(kind: str, rows: int) -> None:
    weights, module, x = store(kind), model(), torch.randn(rows, WIDTH)
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, expected = call(weights, module, x), plain(module, x)
        assert got.dtype == expected.dtype == torch.bfloat16
        assert error(got, expected) <= 2 * max(TOLERANCES[kind], 1e-2)


def test_convolutions_under_autocast_are_bit_equal() -> None:
    module = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Conv2d(64, 32, 3)).eval()
    weights, x = store("bf16"), torch.randn(2, 32, 12, 12)
    for layout in (torch.contiguous_format, torch.channels_last):
        module = module.to(memory_format=layout)
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(call(weights, module, x), plain(module, x))
    assert len(weights._casts) == 2


def test_addmm_as_in_gpt2() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))
            self.bias = nn.Parameter(torch.randn(2 * WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(*x.shape[:-1], -1)

    weights, module = store(), Conv1D().eval()
    near(weights, module, torch.randn(1, 1, WIDTH))
    assert forms(weights) == 1


def test_a_form_is_made_at_the_second_use_and_the_first_is_torchs_own() -> None:
    weights, module, x = store("int4"), model(), torch.randn(1, WIDTH)
    assert torch.equal(call(weights, module, x), plain(module, x))
    assert forms(weights) == 0
    assert torch.equal(call(weights, module, x), plain(module, x))
    assert forms(weights) == 2


def _in_place(module: nn.Module) -> None:
    with torch.no_grad():
        module[0].weight.mul_(3)  # type: ignore[index,operator]


def _data(module: nn.Module) -> None:
    module[0].weight.data.mul_(3)  # type: ignore[index,union-attr,operator]


def _new_data(module: nn.Module) -> None:
    module[0].weight.data = module[0].weight.data * 3  # type: ignore[index,union-attr,operator]


def _numpy(module: nn.Module) -> None:
    array = module[0].weight.detach().numpy()  # type: ignore[index,union-attr,operator]
    array *= 3


def _dlpack(module: nn.Module) -> None:
    torch.from_dlpack(module[0].weight.detach()).mul_(3)  # type: ignore[index,union-attr,operator]


def _capsule(module: nn.Module) -> None:
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(module[0].weight.detach())).mul_(3)  # type: ignore[index,union-attr,arg-type,operator]


def _replaced(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach() * 3)  # type: ignore[index,union-attr,operator]


def _loaded(module: nn.Module) -> None:
    module.load_state_dict({name: value * 3 for name, value in module.state_dict().items()})


def _trained(module: nn.Module) -> None:
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(torch.randn(8, WIDTH)).square().sum().backward()
    optimizer.step()
    module.eval()


def _bias(module: nn.Module) -> None:
    with torch.no_grad():
        module[0].bias.add_(5)  # type: ignore[index,union-attr,operator]


def _bias_data(module: nn.Module) -> None:
    module[0].bias.data = module[0].bias.data + 5  # type: ignore[index,union-attr,operator]


def _merged(module: nn.Module) -> None:
    delta = torch.randn(WIDTH, 4) @ torch.randn(4, WIDTH)
    module[0].weight.data += delta  # type: ignore[index,union-attr,operator]


CHANGES = (
    _in_place,
    _data,
    _new_data,
    _numpy,
    _dlpack,
    _capsule,
    _replaced,
    _loaded,
    _trained,
    _bias,
    _bias_data,
    _merged,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed_at_the_next_call(kind: str, change: Callable[[nn.Module], None]) -> None:
    weights, module, x = store(kind), model(), torch.randn(1, WIDTH)
    near(weights, module, x)
    change(module)
    near(weights, module, x)
    change(module)
    near(weights, module, x, calls=20)
    assert forms(weights) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_in_the_same_memory_from_before_the_first_call_keeps_the_weight_torchs(kind: str) -> None:
    weights, module, x = store(kind), model(), torch.randn(1, WIDTH)
    alias = module[0].weight.data  # type: ignore[index,union-attr]
    near(weights, module, x)
    alias.mul_(3)
    near(weights, module, x)
    assert forms(weights) == 1
    del alias
    near(weights, module, x)
    assert forms(weights) == 2


def test_a_weight_that_keeps_changing_stays_torchs() -> None:
    weights, module, x = store(), model(), torch.randn(1, WIDTH)
    for _ in range(12):
        near(weights, module, x, calls=40)
        _in_place(module)
        with torch.no_grad():
            module[0].weight.div_(3)  # type: ignore[index,operator]
    near(weights, module, x, calls=40)
    assert forms(weights) == 1


def test_casts_of_autocast_follow_changes() -> None:
    module = nn.Conv2d(32, 64, 3).eval()
    weights, x = store("bf16"), torch.randn(1, 32, 8, 8)
    for factor in (1.0, 2.0, 3.0):
        module.weight.data.mul_(factor)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(call(weights, module, x), plain(module, x))


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_casts_of_autocast_follow_changes_through_what_the_program_held_before(how: str) -> None:
    module = nn.Conv2d(32, 64, 3).eval()
    weights, x = store("bf16"), torch.randn(1, 32, 8, 8)
    held: Any = module.weight.data if how == "data" else module.weight.detach().numpy()
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(call(weights, module, x), plain(module, x))
        held *= 2
    del held
    assert weights.low(module.weight, torch.bfloat16) is not None


def test_weights_follow_what_collectives_receive() -> None:
    """These write to a tensor without a change of its version."""
    weights, module, x = store(), nn.Linear(WIDTH, WIDTH).eval(), torch.randn(1, WIDTH)
    near(weights, module, x)
    assert forms(weights)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.distributed.scatter(module.weight.detach(), [torch.randn(WIDTH, WIDTH)])
    finally:
        torch.distributed.destroy_process_group()
    near(weights, module, x, calls=8)


def test_the_programs_view_of_its_model_is_unchanged() -> None:
    weights, module, x = store("int8"), model(), torch.randn(1, WIDTH)
    before, attributes = copy.deepcopy(module.state_dict()), [dict(vars(part)) for part in module.modules()]
    near(weights, module, x)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [dict(vars(part)) for part in module.modules()] == attributes
    clone = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (clone, torch.load(file, weights_only=False)):
        assert torch.equal(plain(other, x), plain(module, x))
        near(weights, other, x)


def test_tied_weights_share_one_form() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(300, WIDTH)
            self.head = nn.Linear(WIDTH, 300, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    weights, module = store("int8"), Tied().eval()
    near(weights, module, torch.tensor([[7]]))
    assert forms(weights) == 1
    _ = module.embedding.weight.data.mul_(2)
    near(weights, module, torch.tensor([[7]]))


def test_gradients_are_torchs_own() -> None:
    weights, module, x = store("int4"), model(), torch.randn(1, WIDTH)
    near(weights, module, x)
    with weights.active(module):
        y = module(x)
    assert torch.equal(y, module(x))
    assert y.requires_grad


def test_torchs_functions_are_its_own_outside_calls() -> None:
    linear, addmm, weights, module = F.linear, torch.addmm, store(), model()
    near(weights, module, torch.randn(1, WIDTH))
    assert F.linear is linear
    assert torch.addmm is addmm

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("program")

    with pytest.raises(KeyError, match="program"):
        call(weights, Failing(), torch.randn(1))
    assert F.linear is linear


def test_other_threads_compute_plainly_at_the_same_time() -> None:
    weights, module, x = store("int4"), model(), torch.randn(1, WIDTH)
    near(weights, module, x)
    inside, done, results = threading.Event(), threading.Event(), []

    class Waiting(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            inside.set()
            assert done.wait(60)
            return value

    thread = threading.Thread(target=call, args=(weights, Waiting(), x))
    thread.start()
    assert inside.wait(60)
    results.append(plain(module, x))
    done.set()
    thread.join()
    assert torch.equal(results[0], plain(module, x))


def test_many_threads_share_a_model() -> None:
    weights, module = store("int8"), model()
    inputs = [torch.randn(1, WIDTH) for _ in range(8)]
    expected = [plain(module, x) for x in inputs]
    errors: list[float] = []

    def work(index: int) -> None:
        errors.extend(error(call(weights, module, inputs[index]), expected[index]) for _ in range(50))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 400
    assert max(errors) <= 4e-2


def test_tracing_scripting_and_compiling_see_torchs_own() -> None:
    weights, module, x = store("int4"), model(), torch.randn(1, WIDTH)
    near(weights, module, x)
    with torch.no_grad(), weights.active(module):
        traced = torch.jit.trace(module, x, check_trace=False)
        mapped = torch.func.vmap(module)(torch.randn(3, WIDTH))
        compiled = torch.compile(module, backend="eager", fullgraph=True)(x)
    assert torch.equal(traced(x), plain(module, x))
    assert mapped.shape == (3, WIDTH)
    assert torch.equal(compiled, plain(module, x))


def test_layers_are_scripted_during_a_call() -> None:
    weights, module, x = store("bf16"), model(), torch.randn(2, 8, WIDTH)
    near(weights, module, x)
    layers = nn.Linear(WIDTH, WIDTH), nn.Conv1d(8, 8, 3), nn.LayerNorm(WIDTH)
    with torch.no_grad(), weights.active(module):
        scripted = [torch.jit.script(layer) for layer in layers]
    for layer, each in zip(layers, scripted, strict=True):
        assert torch.equal(each(x), layer(x))


def test_sensitive_layers_are_kept_in_a_higher_type(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events = tmp_path / "events"
    events.touch()
    monkeypatch.setenv("CPULAUNCH_EVENTS", str(events))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)).eval()
    with torch.no_grad():
        module[0].weight[:, 0] *= 1e4  # One large column leaves the others no precision in int8.
    x = torch.randn(1, WIDTH)
    x[0, 0] = 0
    weights = store("int8")
    near(weights, module, x)
    kinds = [entry.loss.kind for entry in weights._weights.values() if entry is not None and entry.loss is not None]
    assert kinds == ["bf16", "int8"]
    assert "bf16, as int8 has an error of" in events.read_text()


def test_the_memory_limit_holds() -> None:
    weights, module = store("bf16", limit=WIDTH * WIDTH * 4 + 1), model()
    near(weights, module, torch.randn(1, WIDTH))
    assert forms(weights) == 1


def test_forms_die_with_their_weights() -> None:
    weights = store("int8")
    module = model()
    near(weights, module, torch.randn(1, WIDTH))
    del module
    assert (weights._weights, weights._references, weights.bytes) == ({}, set(), 0)


def test_small_and_odd_weights_stay_torchs() -> None:
    weights = store("int8")
    small = nn.Linear(8, 8).eval()
    near(weights, small, torch.randn(1, 8))
    double = model().double()
    assert torch.equal(call(weights, double, torch.randn(1, WIDTH).double()).isfinite(), torch.ones(1, WIDTH).bool())
    with torch.inference_mode():
        inference = model()
        x = torch.randn(1, WIDTH)
        for _ in range(3):
            assert torch.equal(call(weights, inference, x), inference(x))
    assert not weights.covers(small)
    assert weights.covers(model())
    assert forms(weights) == 0


def test_odd_group_sizes_are_kept_in_int8() -> None:
    weights, module = store("int4"), nn.Linear(201, 200).eval()
    near(weights, module, torch.randn(1, 201))
    (entry,) = weights._weights.values()
    assert entry is not None
    assert entry.loss is not None
    assert entry.loss.kind == "int8"


def test_settings_choose_the_type() -> None:
    def kind(**chosen: Any) -> str | None:
        found = residents(TorchSettings(**chosen))
        return None if found is None else found.kind

    assert kind() is None
    assert kind(precision="bf16") == "bf16"
    assert kind(precision="fp16") is None
    assert kind(precision="bf16", weights="int8") == "int8"
    assert kind(weights="fp32") == "fp32"


def test_releasing_keeps_values_pointers_and_writability(tmp_path: Any) -> None:
    weight = nn.Parameter(torch.randn(700, 700))
    before, pointer = weight.detach().clone(), weight.data_ptr()
    view = weight.detach()[3]
    released = release(weight, str(tmp_path))
    assert released > weight.nbytes - 3 * 4096
    assert weight.data_ptr() == pointer
    assert torch.equal(weight, before)
    with torch.no_grad():
        weight[3].add_(1)
    assert torch.equal(view, before[3] + 1)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "(deleted)" in line]
    assert any(int(line.split("-")[0], 16) <= pointer + 8192 < int(line.split("-")[1].split()[0], 16) for line in maps)
    del weight, view
    torch.randn(700, 700)
    assert not os.listdir(tmp_path)


def test_released_weights_are_still_the_programs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    events = tmp_path / "events"
    events.touch()
    monkeypatch.setenv("CPULAUNCH_EVENTS", str(events))
    weights, module, x = store("int8", release=True), model(), torch.randn(1, WIDTH)
    before = copy.deepcopy(module.state_dict())
    near(weights, module, x)
    (event,) = [json.loads(line) for line in events.read_text().splitlines()]
    assert event["bytes_released"] >= 2 * (WIDTH * WIDTH * 4 - 2 * 4096)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    _trained(module)
    near(weights, module, x, calls=8)


def test_releasing_that_fails_is_said_once_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    monkeypatch.setattr("cpulaunch.worker.reporting.degradation.is_worker", lambda: True)
    near(store("int8", release=True), model(), torch.randn(1, WIDTH))
    assert capfd.readouterr().err.count("--release-weights: /dev/shm is in memory itself") == 1


def test_releasing_into_memory_is_refused() -> None:
    with pytest.raises(OSError, match="in memory"):
        release(nn.Parameter(torch.randn(200, 200)), "/dev/shm")


def test_a_forked_child_computes_the_same() -> None:
    weights, module, x = store("int8"), model(), torch.randn(1, WIDTH)
    near(weights, module, x)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = call(weights, module, x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(call(weights, module, x), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(threads)


def test_eligibility_is_decided_once_for_each_weight() -> None:
    weights, module = store(), model()
    near(weights, module, torch.randn(1, WIDTH))
    assert len(weights._weights) == 2
    assert resident_weights.is_eligible(module[0].weight)  # type: ignore[index,arg-type]


@pytest.mark.parametrize("how", ["data", "numpy", "flat"])
def test_a_weight_that_the_program_holds_otherwise_is_not_packed_again(how: str) -> None:
    weights, module, x = store(), nn.Linear(WIDTH, WIDTH).eval(), torch.randn(1, WIDTH)
    near(weights, module, x)
    held: Any = module.weight.data if how == "data" else module.weight.detach().numpy()
    if how == "flat":
        held = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        nn.utils.vector_to_parameters(held, module.parameters())
    near(weights, module, x, calls=20)
    held *= 2
    near(weights, module, x, calls=2)
    assert not forms(weights)
    del held
    near(weights, module, x, calls=20)
    assert forms(weights) == (how != "flat")  # The bias still holds the memory of both.


def test_weights_in_shared_memory_can_be_changed_by_other_processes() -> None:
    weights, module, x = store(), nn.Linear(WIDTH, WIDTH).eval(), torch.randn(1, WIDTH)
    near(weights, module, x)
    assert forms(weights)
    module.share_memory()
    near(weights, module, x, calls=8)
    assert not forms(weights)
    assert not any(entry for entry in _entries(store(), nn.Linear(WIDTH, WIDTH).share_memory().eval()))


def _entries(weights: ResidentWeights, module: nn.Module) -> list[Any]:
    near(weights, module, torch.randn(1, WIDTH))
    return list(weights._weights.values())


def _of_numpy() -> tuple[nn.Module, Any]:
    array, module = numpy.random.rand(WIDTH, WIDTH).astype("float32"), nn.Linear(WIDTH, WIDTH).eval()
    module.weight = nn.Parameter(torch.from_numpy(array))
    return module, array


def _of_buffer() -> tuple[nn.Module, Any]:
    array = numpy.random.rand(WIDTH, WIDTH).astype("float32")
    module = nn.Linear(WIDTH, WIDTH).eval()
    module.weight = nn.Parameter(torch.frombuffer(array.data, dtype=torch.float32).view(WIDTH, WIDTH))
    return module, array


def _assigned_later() -> tuple[nn.Module, Any]:
    module, array = nn.Linear(WIDTH, WIDTH).eval(), numpy.random.rand(WIDTH, WIDTH).astype("float32")
    module.weight.data = torch.from_numpy(array)
    return module, array


@pytest.mark.parametrize("make", [_of_numpy, _of_buffer, _assigned_later])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_weights_in_the_memory_of_an_array_stay_torchs(make: Any, kind: str) -> None:
    weights, x = store(kind), torch.randn(1, WIDTH)
    module, array = make()
    near(weights, module, x)
    array *= 3
    near(weights, module, x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert weights.low(module.weight, torch.bfloat16) is None
    assert not forms(weights)


@pytest.mark.parametrize("mmap", [False, True])
def test_weights_that_torch_has_read_from_a_file_are_packed(tmp_path: Path, mmap: bool) -> None:
    module, weights = nn.Linear(WIDTH, WIDTH).eval(), store()
    torch.save(module.state_dict(), tmp_path / "weights")
    module.load_state_dict(torch.load(tmp_path / "weights", mmap=mmap), assign=True)
    near(weights, module, torch.randn(1, WIDTH))
    assert forms(weights) == 1


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_parameters_may_be_swapped(precision: str | None) -> None:
    weights, module, x = store(), model(), torch.randn(1, WIDTH)
    near(weights, module, x)
    if precision:
        with torch.no_grad():
            weights.low(module[0].weight, torch.bfloat16)  # type: ignore[index,arg-type]
    other = {name: value * 3 for name, value in module.state_dict().items()}
    module.load_state_dict(other)
    near(weights, module, x)
    assert forms(weights) == 2
    module.to(torch.bfloat16)
    near(weights, module, x.bfloat16())
    assert forms(weights) == 2


def test_freed_forms_leave_no_memory_and_are_made_again() -> None:
    weights, module, x = store(), model(), torch.randn(1, WIDTH)
    near(weights, module, x)
    packed = [weakref.ref(entry.form._packed.data) for entry in weights._weights.values() if entry and entry.form]
    weights.free(module)
    assert [each() for each in packed] == [None, None]
    assert weights.bytes == 0
    near(weights, module, x)
    assert forms(weights) == 2


def test_changed_weights_do_not_use_up_the_memory_limit() -> None:
    weights, module = store("int8", limit=3 * WIDTH * WIDTH * 4), nn.Linear(WIDTH, WIDTH).eval()
    for _ in range(3):
        near(weights, module, torch.randn(1, WIDTH), calls=20)
        _in_place(nn.Sequential(module))
    assert weights.bytes < 2 * WIDTH * WIDTH


def test_an_interrupt_on_entry_leaves_torchs_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise KeyboardInterrupt

    class Owner(metaclass=Interrupting):
        function = "plain"

    monkeypatch.setattr(functions, "_replaced", [*functions._replaced, (Owner, "function", "other", "plain")])
    with pytest.raises(KeyboardInterrupt):
        call(store(), model(), torch.randn(1, WIDTH))
    assert F.linear is functions.plain_linear
    assert functions._thread.store is None
    monkeypatch.undo()
    near(store(), model(), torch.randn(1, WIDTH))


def test_only_a_weights_own_pages_are_released(tmp_path: Any) -> None:
    both = torch.randn(2 * WIDTH, WIDTH)
    released = release(nn.Parameter(both[:WIDTH]), str(tmp_path))
    assert 0 < released <= both.nbytes // 2


def test_a_call_may_begin_anywhere_in_this_thread() -> None:
    weights, module = store(), nn.Linear(WIDTH, WIDTH).eval()
    with functions._lock:  # As in a signal handler.
        call(weights, module, torch.randn(1, WIDTH))
    assert F.linear is functions.plain_linear


def test_a_forked_child_forgets_the_calls_of_other_threads() -> None:
    weights, module, inside, done = store(), nn.Linear(WIDTH, WIDTH).eval(), threading.Event(), threading.Event()

    def other() -> None:
        with weights.active(module), functions._lock:
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    child = os.fork()
    if not child:
        is_restored = F.linear is functions.plain_linear
        is_free = functions._lock.acquire(timeout=5)
        os._exit(0 if is_restored and is_free else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


JEMALLOC = sorted(Path("/usr/lib").glob("**/libjemalloc.so.2"))


@pytest.mark.skipif(not JEMALLOC, reason="jemalloc is not installed")
def test_memory_of_an_allocator_that_expects_zeros_is_not_released(tmp_path: Any) -> None:
    program = (
        "import sys, torch; from torch import nn; from cpulaunch.worker.weights.release import release\n"
        "try: release(nn.Parameter(torch.randn(700, 700)), sys.argv[1])\n"
        "except OSError as error: print(error)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {**os.environ, "LD_PRELOAD": str(JEMALLOC[0])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "allocator" in ended.stdout


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_a_type_loses_is_measured_where_the_input_is_not_zero(kind: str) -> None:
    module, weights, x = nn.Linear(WIDTH, WIDTH, bias=False).eval(), store(kind), torch.randn(3, WIDTH)
    with torch.no_grad():
        module.weight[:, 0] *= 3000
    x[:, 0] = 0
    padded = torch.cat([torch.zeros(1, WIDTH), x])
    near(weights, module, torch.zeros(2, WIDTH) * float("nan"), calls=0)
    for value in (torch.zeros(2, WIDTH), torch.full((2, WIDTH), float("nan"))):
        for _ in range(4):
            call(weights, module, value)
    assert not forms(weights)
    for _ in range(4):
        assert error(call(weights, module, padded), plain(module, padded)) < 0.02
    assert forms(weights)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_bias_that_the_program_holds_otherwise_is_read_as_it_is_now(rows: int) -> None:
    weights, module = store(), nn.Linear(WIDTH, WIDTH).to(torch.bfloat16).eval()
    held, x = module.bias.data, torch.randn(rows, WIDTH, dtype=torch.bfloat16)
    near(weights, module, x)
    held.fill_(100.0)
    near(weights, module, x)
    assert forms(weights)


def test_an_interrupt_on_exit_is_forgotten_at_the_next_call() -> None:
    weights, module, x = store(), model(), torch.randn(1, WIDTH)
    interrupted = weights.active(module)
    interrupted.__enter__()
    near(weights, module, x)
    assert F.linear is functions.plain_linear
    assert functions._thread.store is None


def test_classes_without_end_are_not_kept() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x

    before = list(functions._replaced)
    try:
        for _ in range(2 * functions.MAX_REPLACED):
            functions.replace_forward(type("Norm", (nn.Module,), {"forward": forward}), forward)
        assert len(functions._replaced) == functions.MAX_REPLACED
    finally:
        functions._replaced[:] = before
