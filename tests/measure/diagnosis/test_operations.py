"""Events of the profiler, added up."""

import pytest

from cpulaunch.records.record import replace
from cpulaunch.worker.diagnosis.events import spans
from cpulaunch.worker.diagnosis.events.chains import spared
from cpulaunch.worker.diagnosis.events.kinds import Event, kind_of
from cpulaunch.worker.diagnosis.events.moved_bytes import bytes_moved
from cpulaunch.worker.diagnosis.events.operations import add_up, backward_waits, communication

US = 1000


def event(name, start, length, **facts):
    return Event(name=name, start=start * US, end=(start + length) * US, **facts)


def summed(*events, end=10_000, **how):
    return add_up(events, 0, end * US, **how)


@pytest.mark.parametrize(
    ("name", "types", "kind"),
    [
        ("aten::addmm", ["float", "float"], "products"),
        ("aten::mkldnn_convolution", ["float"], "products"),
        ("aten::bmm", ["c10::BFloat16"], "low products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ["float"], "products"),
        ("aten::item", [], "synchronization"),
        ("aten::nonzero", ["bool"], "other"),
        ("torch.distributed.ddp.reducer::copy_bucket_to_grad", [], "other"),
        ("torch::autograd::AccumulateGrad", [], "other"),
        ("torchvision::nms", ["float"], "computing"),
        ("aten::empty_strided", [], "allocation"),
        ("aten::select", [], "access"),
        ("c10d::allreduce_", [], "collective"),
        ("aten::softmax", ["float"], "other"),
        ("aten::native_layer_norm", ["float"], "other"),
        ("aten::upsample_bilinear2d", ["float"], "other"),
        ("aten::_weight_int4pack_mm_for_cpu", ["c10::BFloat16", "unsigned char"], "low products"),
        ("mkl::_mkl_linear", ["float"], "products"),
        ("aten::linalg_svd", ["float"], "computing"),
        ("aten::normal_", ["float"], "computing"),
        ("aten::sort", ["float"], "computing"),
        ("mine::fused", ["float"], "computing"),
        ("## Call CompiledFxGraph fx1 ##", [], "computing"),
        ("gloo:all_reduce", [], "collective"),
    ],
)
def test_kinds(name, types, kind):
    assert kind_of(Event(name=name, start=0, end=1, types=types)) == kind


def test_own_times_of_nested_operations_add_up():
    found = summed(event("aten::linear", 100, 1000), event("aten::addmm", 200, 800, flops=8e5, types=["float"]))
    assert found["kinds"] == pytest.approx({"products": 1000e-6})  # linear is one itself, around addmm
    assert found["flops"] == {"products": 8e5}
    assert found["timed"] == pytest.approx({"products": 800e-6})


def test_conversions_inside_a_product_of_low_precision_are_its_own():
    inner = [event("aten::to", 0, 400), event("aten::addmm", 400, 500, types=["c10::BFloat16"])]
    assert summed(event("aten::linear", 0, 1000), *inner)["kinds"] == pytest.approx({"low products": 1000e-6})


def test_tiny_operations_take_the_time_before_them():
    found = summed(*[event("aten::add", 10 * number, 4) for number in range(100)], end=1000)
    assert found["tiny"]["seconds"] == pytest.approx(99 * 10e-6 + 4e-6)
    assert found["calls"]["tiny"] == 100
    assert found["kinds"] == {}


def test_a_long_time_between_operations_is_a_pause():
    found = summed(event("aten::mm", 0, 1000), event("aten::mm", 5000, 1000), end=6000)
    assert found["pauses"] == pytest.approx(4000e-6)


def test_time_in_loaders_and_collectives_is_left_to_the_hooks():
    waits = [event("cpulaunch::data", 0, 4000), event("aten::stack", 1000, 2000), event("aten::mm", 4010, 1000)]
    found = summed(*waits, end=5010)
    assert found["kinds"] == pytest.approx({"products": 1000e-6})
    assert found["pauses"] == 0
    assert found["regions"] == pytest.approx({"data": 4000e-6})


def test_an_interrupted_operation_counts_as_others_of_its_kind():
    adds = [event("aten::add", 1000 * number, 900 if number == 5 else 50, shapes=[[8]]) for number in range(10)]
    assert summed(*adds)["absorbed"] == pytest.approx((900 - 105) * 1e-6, rel=0.01)


def test_iterating_over_a_tensor_takes_out_its_rows():
    found = summed(event("aten::unbind", 0, 30, shapes=[[64, 3]]), event("aten::select", 40, 3))
    assert found["calls"]["accesses"] == 65


def test_operations_outside_of_modules_are_told_from_those_inside():
    inside = [event("cpulaunch::module", 0, 100), event("aten::add", 10, 4)]
    found = summed(*inside, event("aten::add", 200, 4), event("autograd::engine::evaluate_function: X", 300, 90))
    assert (found["calls"]["forward"], found["calls"]["outside"], found["calls"]["backward"]) == (2, 1, 1)


def test_bytes_of_element_wise_operations_by_their_size():
    added = event("aten::add", 0, 500, shapes=[[1000, 10], [1000, 10]], types=["float", "float"])
    assert summed(added)["bytes"] == {"17": [120_000.0, pytest.approx(500e-6)]}


@pytest.mark.parametrize(
    ("name", "shapes", "types", "expected"),
    [
        ("aten::add", [[100, 10], [10], []], ["float", "float", "Scalar"], 4 * (1000 + 10 + 1000)),
        ("aten::add_", [[100, 10], [100, 10]], ["float", "float"], 4 * 3000),
        ("aten::mul", [[100], []], ["c10::BFloat16", "Scalar"], 2 * 200),
        ("aten::mul", [[100], [100]], ["c10::BFloat16", "float"], 2 * 100 + 4 * 200),
        ("aten::copy_", [[100], [100], []], ["float", "double", ""], 8 * 100 + 4 * 100),
        ("aten::relu", [[100]], ["float"], 800),
        ("aten::where", [[100], [100], [1]], ["bool", "float", "float"], 100 + 400 + 4 + 400),
        ("aten::add", [[0, 5], [1, 5]], ["float", "float"], 20),
        ("aten::add", [[100]], ["c10::complex<float>"], 0),
        ("aten::softmax", [[100]], ["float"], 0),
        ("aten::cat", [[[100], [100]]], ["TensorList"], 0),
        ("aten::add", [], [], 0),
        ("mine::add", [[100]], ["float"], 0),
    ],
)
def test_bytes_of_an_operation(name, shapes, types, expected):
    assert bytes_moved(Event(name=name, start=0, end=1, shapes=shapes, types=types)) == expected


def test_kernels_of_a_compiled_graph_have_no_events():
    graph = event("## Call CompiledFxGraph fx1 ##", 100, 5000)
    found = summed(graph, event("mkl::_mkl_linear", 1000, 1000, types=["float"]), end=5100)
    assert found["kinds"] == pytest.approx({"computing": 4000e-6, "products": 1000e-6})
    assert found["pauses"] == 0


def test_little_arithmetic_beside_the_kernels_of_a_compiled_graph_makes_it_not_tiny():
    inside = event("aten::mm", 1000, 10, types=["float"], flops=1000)
    found = summed(event("## Call CompiledFxGraph fx1 ##", 100, 5000), inside)
    assert found["calls"].get("tiny", 0) == 0


def test_a_region_that_the_program_names_hides_no_operations():
    tiny = [event("aten::add", 10 * number, 4) for number in range(100)]
    found = summed(event("train: step", 0, 1000), *tiny, end=1000)
    assert found["calls"]["tiny"] == 100
    assert found["kinds"] == {}


def test_products_of_low_precision_by_their_type():
    products = [event("aten::mm", 1000 * number, 500, types=["c10::Half", "c10::Half"]) for number in range(3)]
    assert summed(*products, event("aten::mm", 5000, 100, types=["BFloat16"]))["low"] == pytest.approx(
        {"fp16": 1500e-6, "bf16": 100e-6}
    )


def test_moments_are_counted_once():
    assert spans.joined([(5, 9), (0, 3), (2, 4), (9, 10), (6, 6)]) == [(0, 4), (5, 10)]
    assert spans.common([(0, 4), (5, 10)], [(3, 6), (8, 20)]) == [(3, 4), (5, 6), (8, 10)]
    assert spans.length([(0, 4), (2, 6)]) == pytest.approx(6e-9)


def test_a_backward_pass_that_waits_for_other_ranks():
    events = [
        event("cpulaunch::backward", 0, 1000),
        event("autograd::engine::evaluate_function: AddmmBackward0", 0, 200),
        event("aten::mm", 0, 200),
        event("aten::mul_", 900, 100),
    ]
    assert backward_waits(events, [(100 * US, 800 * US), (950 * US, 2000 * US)]) == pytest.approx(600e-6)
    assert backward_waits(events[1:], [(100 * US, 800 * US)]) == 0


def test_communication_is_hidden_where_the_process_computes_meanwhile():
    events = [event("aten::mm", 0, 600), event("cpulaunch::collective", 600, 200)]
    running = [(100 * US, 300 * US), (500 * US, 800 * US), (2000 * US, 9000 * US)]
    found = communication(events, running, (0, 1000 * US), 50e-6)
    assert found == pytest.approx({"seconds": 500e-6, "hidden": 250e-6})
    assert communication(events, [], (0, 1000 * US), 0.0) == {"seconds": 0, "hidden": 0}


def test_the_gradients_of_parts_belong_to_taking_them():
    node = "autograd::engine::evaluate_function: SelectBackward0"
    made = [event("SelectBackward0", 10, 500), event("aten::select_backward", 20, 400), event("aten::zeros", 30, 300)]
    found = summed(event(node, 0, 900), *made, event("aten::add_", 550, 300), event("aten::mul", 1000, 200), end=1200)
    assert found["kinds"] == pytest.approx({"access": 700e-6, "other": 200e-6})


def test_parts_that_a_closure_or_a_function_takes_are_beside_those_of_models():
    step = [event("Optimizer.step#LBFGS.step", 0, 1000), event("aten::select", 10, 3)]
    closure = [event("cpulaunch::closure", 100, 500), event("aten::select", 110, 3), event("aten::mul", 120, 3)]
    loss = [event("cpulaunch::function", 2000, 100), event("aten::select", 2010, 3)]
    model = [event("cpulaunch::module", 3000, 100), event("aten::select", 3010, 3)]
    calls = summed(*step, *closure, *loss, *model)["calls"]
    assert (calls["forward"], calls["outside"], calls["accesses"], calls["outside_accesses"]) == (4, 3, 3, 2)


def test_what_follows_a_model_and_precedes_gradients_is_a_loss():
    backward = "autograd::engine::evaluate_function: X"
    step = [event("aten::rand", 0, 3), event("cpulaunch::module", 10, 50), event("aten::mul", 20, 3)]
    step += [event("aten::sub", 70 + number, 1) for number in range(3)]
    step += [event(backward, 100, 50), event("aten::mul", 110, 3), event("Optimizer.step#SGD.step", 200, 50)]
    step += [event("aten::add_", 210, 3), event("aten::lerp_", 300, 3), event("aten::lerp_", 310, 3)]
    later = [replace(each, start=each.start + 1000 * US, end=each.end + 1000 * US) for each in step]
    calls = summed(*step, *later)["calls"]
    assert (calls["outside"], calls["loss"]) == (12, 6)


CHAINS = {
    "a chain": (["mul", "sigmoid", "add"], 2.0),
    "a chain of gradients": (["mul", "gelu_backward", "native_layer_norm_backward"], 2.0),
    "an optimizer's": (["_foreach_mul_", "_foreach_addcdiv_", "_foreach_add_"], 2.0),
    "a sum before a norm": (["add", "native_layer_norm", "mm", "add", "native_layer_norm"], 0.0),
    "one pass": (["embedding_bag", "_embedding_bag", "index_select"], 0.0),
    "copies": (["clone", "mm", "cat", "copy_"], 3.0),
    "chains on both sides": (["mul", "add", "exp", "cat", "add", "div", "tanh"], 5.0),
    "of an extension": (["mine::add", "mine::add", "mine::add"], 0.0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_fused_kernels_would_save(name):
    names, seconds = CHAINS[name]
    assert spared([(each if "::" in each else f"aten::{each}", 1.0) for each in names]) == seconds


def test_tiny_operations_do_not_break_a_chain():
    adds = [event("aten::add", 1000 * number, 900) for number in range(3)]
    found = summed(*adds, event("aten::view", 950, 3), event("aten::mm", 4000, 100))
    assert found["chained"] == pytest.approx(1800e-6)


@pytest.mark.parametrize("disturbed", [False, True])
def test_a_sum_inside_an_operation_does_not_make_it_small(disturbed):
    layers = [(event("aten::lstm", 20_000 * number, 15_000), 20_000 * number) for number in range(4)]
    sums = [event("aten::add", start + 10, 5, flops=2048) for _, start in layers]
    found = summed(*[layer for layer, _ in layers], *sums, end=100_000, disturbed=disturbed)
    assert found["calls"].get("tiny", 0) == 0
    assert found["kinds"] == pytest.approx({"other": 60_000e-6})


def test_an_interruption_before_a_region_is_no_code_of_the_programs():
    events, at = [], 0
    for gap in (50, 3000, 40, 60):
        events += [event("cpulaunch::module", at + gap, 100), event("aten::mm", at + gap, 100)]
        at += gap + 100
    assert summed(*events, end=at)["pauses"] == pytest.approx(3000e-6)
    found = summed(*events, end=at, disturbed=True)
    assert (found["pauses"], found["absorbed"]) == (0, pytest.approx((3000 - 85) * 1e-6))


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::gelu", [[64, 1000]], 335),
        ("aten::add", [[64, 1], [1000]], 335),
        ("aten::native_layer_norm_backward", [[8, 1000], [8, 1000], [8, 1]], 55),
        ("aten::cross_entropy_loss", [[512, 10], [512, 1], []], 40.6),
        ("aten::gelu", [], 6500),
        ("aten::_foreach_mul_", [[], []], 6500),
        ("aten::embedding", [[64, 1000]], 6500),
    ],
)
def test_an_operation_of_each_element_that_was_always_interrupted(name, shapes, expected):
    waits = [event(name, 10_000 * number, 6500, shapes=shapes) for number in range(2)]
    found = summed(*waits, end=20_000, disturbed=True)
    assert sum(found["kinds"].values()) == pytest.approx(2 * expected * 1e-6)
    assert sum(summed(*waits, end=20_000)["kinds"].values()) == pytest.approx(2 * 6500e-6)
