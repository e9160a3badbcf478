"""`--fused-optimizers`: the same numbers but for rounding, and optimizers that look as they always do."""

import json
import textwrap

import pytest

from tests.worker.applying import case, run_cases

pytestmark = pytest.mark.torch

PRELUDE = """
import copy, io, json, pickle, traceback, warnings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

class Fused(TorchDispatchMode):
    calls = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += "_fused_" in str(func)
        return func(*args, **(kwargs or {}))

def build(dtype=torch.float32, layout=torch.contiguous_format):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16), nn.Tanh(), nn.Linear(16, 1))
    return net.to(dtype).to(memory_format=layout)

def grade(net, step):
    torch.manual_seed(step)
    x = torch.randn(4, 3, 8, 8).to(next(net.parameters()))
    loss = (net(x) - x.sum(dim=(1, 2, 3), keepdim=True)[:, :, 0, 0]).square().mean()
    loss.backward()
    return loss.item()

def train(net, optimizer, steps=50, scheduler=None):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(grade(net, step))
        optimizer.step()
        if scheduler:
            scheduler.step()
    return losses

def fused_calls(work):
    with Fused() as mode:
        result = work()
    return mode.calls, result

def compare(kind, layout=torch.contiguous_format, dtype=torch.float32, scheduled=False, **options):
    def run(**choice):
        net = build(dtype, layout)
        optimizer = kind(net.parameters(), **options, **choice)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7) if scheduled else None
        return train(net, optimizer, scheduler=scheduler), list(net.parameters())
    calls, (losses, weights) = fused_calls(run)
    plain_calls, (plain_losses, plain_weights) = fused_calls(lambda: run(fused=False))
    far = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, plain_losses)]
    apart = max((a - b).abs().max().item() for a, b in zip(weights, plain_weights))
    assert (calls, plain_calls) == (50, 0), (calls, plain_calls)
    assert losses[0] == plain_losses[0] and losses[-1] != losses[0]
    assert max(far) < 1e-3 and apart < 1e-4, (kind, options, max(far), apart)
"""
OPTIM = "torch.optim"
COMPARED = {
    "Adam": f"compare({OPTIM}.Adam, lr=1e-3)",
    "Adam with amsgrad and weight decay": f"compare({OPTIM}.Adam, lr=1e-3, amsgrad=True, weight_decay=0.1)",
    "Adam that maximizes": f"compare({OPTIM}.Adam, lr=1e-4, maximize=True)",
    "Adam in double precision": f"compare({OPTIM}.Adam, lr=1e-3, dtype=torch.double)",
    "Adam in channels_last": f"compare({OPTIM}.Adam, lr=1e-3, layout=torch.channels_last)",
    "AdamW": f"compare({OPTIM}.AdamW, lr=1e-3)",
    "AdamW with a schedule": f"compare({OPTIM}.AdamW, lr=1e-2, scheduled=True)",
    "AdamW with amsgrad": f"compare({OPTIM}.AdamW, lr=1e-3, amsgrad=True, betas=(0.8, 0.9), eps=1e-6)",
    "SGD": f"compare({OPTIM}.SGD, lr=1e-3)",
    "SGD with weight decay": f"compare({OPTIM}.SGD, lr=1e-3, weight_decay=0.1)",
    "SGD with momentum": f"compare({OPTIM}.SGD, lr=1e-3, momentum=0.9)",
    "SGD with dampening": f"compare({OPTIM}.SGD, lr=1e-3, momentum=0.9, dampening=0.3, weight_decay=0.01)",
    "SGD with Nesterov momentum": f"compare({OPTIM}.SGD, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "SGD that maximizes": f"compare({OPTIM}.SGD, lr=1e-5, momentum=0.5, maximize=True)",
    "SGD in channels_last": f"compare({OPTIM}.SGD, lr=1e-3, momentum=0.9, layout=torch.channels_last)",
    "Adagrad": f"compare({OPTIM}.Adagrad, lr=1e-2)",
    "Adagrad with decay": f"compare({OPTIM}.Adagrad, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1)",
}
UNCHANGED = {
    "groups and checkpoints": """
        net = build()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        train(net, optimizer, 3)
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["fused"] is None and saved["param_groups"][0]["foreach"] is None
        file = io.BytesIO()
        torch.save(saved, file)
        again = torch.optim.AdamW(net.parameters(), lr=1e-3)
        again.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        thrown = pickle.loads(pickle.dumps(optimizer))
        copied = copy.deepcopy(optimizer)
        assert fused_calls(lambda: train(net, again, 2))[0] == 2
        for other in (thrown, copied):
            for parameter in other.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            assert fused_calls(other.step)[0] == 1
        """,
    "groups added later": """
        net = build()
        optimizer = torch.optim.SGD(net[0].parameters(), lr=1e-3, momentum=0.9)
        train(net, optimizer, 2)
        optimizer.add_param_group({"params": net[3].parameters(), "lr": 1e-4})
        assert fused_calls(lambda: train(net, optimizer, 2))[0] == 4
        """,
    "subclasses and hooks": """
        class Mine(torch.optim.Adam):
            steps = 0
            def step(self, closure=None):
                self.steps += 1
                return super().step(closure)
        net = build()
        optimizer = Mine(net.parameters())
        seen = []
        optimizer.register_step_post_hook(lambda *failure: seen.append(1))
        assert (calls := fused_calls(lambda: train(net, optimizer, 3))[0]) == 3, calls
        assert optimizer.steps == 3 and seen
        assert optimizer.step(lambda: 7.0) == 7.0
        """,
    "version counters": """
        net = build()
        optimizer = torch.optim.Adam(net.parameters())
        before = [parameter._version for parameter in net.parameters()]
        train(net, optimizer, 1)
        assert all(parameter._version > was for parameter, was in zip(net.parameters(), before))
        """,
    "version counters of an older torch, which counts one tensor at a time": """
        counted = torch.autograd.graph.increment_version
        def count_one(tensor):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError("one tensor")
            counted(tensor)
        net = build()
        optimizer = torch.optim.Adam(net.parameters())
        train(net, optimizer, 1)
        before = [parameter._version for parameter in net.parameters()]
        torch.autograd.graph.increment_version = count_one
        try:
            optimizer.step()
        finally:
            torch.autograd.graph.increment_version = counted
        assert all(parameter._version > was for parameter, was in zip(net.parameters(), before))
        """,
    "an implementation chosen by the program": """
        for choice in ({"fused": False}, {"foreach": False}, {"foreach": True}, {"differentiable": True}):
            optimizer = torch.optim.Adam(build().parameters(), **choice)
            if not choice.get("differentiable"):
                net = build()
                optimizer = torch.optim.Adam(net.parameters(), **choice)
                assert fused_calls(lambda: train(net, optimizer, 2))[0] == 0, choice
        net = build()
        assert fused_calls(lambda: train(net, torch.optim.Adam(net.parameters(), fused=True), 2))[0] == 2
        """,
    "a GradScaler": """
        net = build()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [parameter.clone() for parameter in net.parameters()]
        scaler.scale(net(torch.ones(1, 3, 8, 8)).sum()).backward()
        unscaled = [parameter.grad / 4 for parameter in net.parameters()]
        scaler.step(optimizer)
        for parameter, old, gradient in zip(net.parameters(), before, unscaled):
            assert torch.allclose(parameter, old - 1e-3 * gradient)
        """,
    "parameters with gradients only in later steps": """
        def run(**choice):
            a, b = (nn.Parameter(torch.ones(3)) for _ in "ab")
            optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9, dampening=0.5, **choice)
            for step in range(4):
                a.grad, b.grad = torch.full([3], 1.0), torch.full([3], 2.0) if step else None
                optimizer.step()
            return a, b
        calls, fused = fused_calls(run)
        assert calls == 3 and all(map(torch.allclose, fused, run(fused=False)))
        """,
    "torch.compile": """
        net = build()
        optimizer = torch.optim.Adam(net.parameters())
        torch.compile(optimizer.step, backend="eager")
        grade(net, 0)
        before = net[3].weight.clone()
        torch.compile(optimizer.step, backend="eager")()
        assert not torch.equal(before, net[3].weight)
        """,
    "scripted optimizers": """
        warnings.simplefilter("ignore")
        from torch.distributed.optim.functional_adam import _FunctionalAdam
        from torch.distributed.optim.functional_sgd import _FunctionalSGD
        weight = torch.ones(3, requires_grad=True)
        for kind in (_FunctionalAdam, _FunctionalSGD):
            kind([weight]).step([torch.ones(3)])
        """,
    "no parameters with gradients": """
        for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
            kind(build().parameters(), lr=0.1).step()
        """,
    "derivatives of a step": """
        from torch.autograd import forward_ad
        from torch.optim.sgd import sgd
        def moved(start):
            place = start.clone()
            numbers = dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0)
            sgd([place], [start * start], [], lr=0.1, nesterov=False, maximize=False, **numbers)
            return place
        start = torch.tensor([1.0, 2.0], requires_grad=True)
        place = start.clone()
        optimizer = torch.optim.SGD([place], lr=0.1, differentiable=True)
        place.grad = start * start
        optimizer.step()
        place.sum().backward()
        expected = 1 - 0.2 * start.detach()
        assert torch.allclose(start.grad, expected), start.grad
        assert torch.allclose(torch.func.grad(lambda value: moved(value).sum())(start.detach()), expected)
        with torch.no_grad(), forward_ad.dual_level():
            dual = moved(forward_ad.make_dual(start.detach(), torch.ones(2)))
            assert torch.allclose(forward_ad.unpack_dual(dual).tangent, expected)
        with torch.no_grad():
            assert torch.vmap(moved)(torch.ones(3, 2)).shape == (3, 2)
        """,
    "flags that are no bools": """
        for kind, flags in (
            (torch.optim.Adam, {"amsgrad": 1, "maximize": None}),
            (torch.optim.SGD, {"momentum": 0.9, "nesterov": 1, "maximize": 1}),
            (torch.optim.Adagrad, {"maximize": None}),
        ):
            def run(**choice):
                net = build()
                train(net, kind(net.parameters(), lr=1e-5, **flags, **choice), 2)
                return list(net.parameters())
            calls, fused = fused_calls(run)
            assert calls == 2 and all(map(torch.allclose, fused, run(foreach=False))), kind
        """,
    "parameters without elements": """
        for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
            weights = [nn.Parameter(torch.ones(shape)) for shape in ((0,), (2, 0), (), (3,))]
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            assert fused_calls(kind(weights, lr=0.1).step)[0] == 1
            assert weights[2] < 1 and (weights[3] < 1).all()
        """,
    "complex parameters": """
        weight = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
        weight.grad = torch.ones_like(weight)
        torch.optim.Adam([weight]).step()
        """,
}
REFUSED = {
    # what: (program, text of the warning)
    "sparse gradients": (
        """
        bag = nn.Embedding(9, 3, sparse=True)
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        for _ in range(2):
            bag(torch.tensor([1, 2])).sum().backward()
            assert fused_calls(optimizer.step)[0] == 0
        """,
        "sgd is not fused: gradients are sparse",
    ),
    "low precision": (
        """
        net = build(torch.bfloat16)
        assert fused_calls(lambda: train(net, torch.optim.Adam(net.parameters()), 2))[0] == 0
        """,
        "adam is not fused: parameters are bfloat16",
    ),
    "a tensor for a learning rate": (
        """
        net = build()
        assert fused_calls(lambda: train(net, torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1)), 2))[0] == 0
        """,
        "adam is not fused: its lr has type Tensor",
    ),
    "a learning rate of a foreign type": (
        """
        class Rate:
            def __float__(self): return 0.1
            def __neg__(self): return -0.1
        net = build()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = Rate()
        assert fused_calls(lambda: train(net, optimizer, 2))[0] == 0
        """,
        "sgd is not fused: its lr has type Rate",
    ),
    "a parameter listed twice": (
        """
        warnings.simplefilter("ignore")
        def run(**choice):
            weight = nn.Parameter(torch.ones(3))
            optimizer = torch.optim.Adam([weight, weight], lr=0.1, **choice)
            for step in range(3):
                weight.grad = torch.full([3], 1.0 + step)
                optimizer.step()
            return weight
        calls, weight = fused_calls(run)
        assert calls == 0 and torch.equal(weight, run(fused=False))
        """,
        "adam is not fused: a parameter is listed twice",
    ),
    "negated views": (
        """
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch._neg_view(torch.ones(3))
        torch.optim.SGD([weight], lr=0.5).step()
        assert torch.equal(weight, torch.full([3], 1.5))
        """,
        "sgd is not fused: gradients are negated views",
    ),
    "another memory layout": (
        """
        def run(**choice):
            net = build()
            optimizer = torch.optim.Adam(net.parameters(), **choice)
            train(net, optimizer, 2)
            net.to(memory_format=torch.channels_last)
            train(net, optimizer, 2)
            return net
        with Fused() as mode:
            fused = run()
        assert mode.calls == 2, mode.calls
        for a, b in zip(fused.parameters(), run(fused=False).parameters()):
            assert torch.allclose(a, b, atol=1e-5)
        """,
        "adam is not fused: a parameter, its gradient and its state have different memory layouts",
    ),
    "parameters with gaps in memory": (
        """
        weight = nn.Parameter(torch.ones(4, 4)[:, ::2])
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = torch.ones(4, 2)
        optimizer.step()
        assert torch.allclose(weight, torch.full([4, 2], 0.9))
        """,
        "sgd is not fused: a parameter, its gradient and its state have different memory layouts",
    ),
}


def checked(name, text):
    """Code that prints one line of JSON: the name of the check and its traceback (None: it passed)."""
    body = textwrap.indent(textwrap.dedent(text).strip(), "    ")
    failure = f"print(json.dumps([{name!r}, traceback.format_exc()]))"
    return f"try:\n{body}\n    print(json.dumps([{name!r}, None]))\nexcept BaseException:\n    {failure}\n"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The outcome of all checks, in one process because its first optimizer imports torch modules for a second."""
    checks = COMPARED | UNCHANGED | {name: text for name, (text, _) in REFUSED.items()}
    program = PRELUDE + "".join(checked(name, text) for name, text in checks.items())
    folder = tmp_path_factory.mktemp("optimizers")
    return run_cases({"all": case(program, fused_optimizers=True)}, folder)["all"]


def failure(outcome, name):
    assert outcome.code == 0, outcome.err
    return dict(json.loads(line) for line in outcome.out.splitlines())[name]


@pytest.mark.parametrize("name", COMPARED)
def test_fifty_fused_steps_differ_by_rounding(outcome, name):
    assert failure(outcome, name) is None


@pytest.mark.parametrize("name", UNCHANGED)
def test_behavior_other_than_speed_does_not_change(outcome, name):
    assert failure(outcome, name) is None


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_cannot_be_fused_prints_one_warning(outcome, name):
    assert failure(outcome, name) is None
    assert f"cpulaunch: worker 0: warning: --fused-optimizers: {REFUSED[name][1]}" in outcome.cpulaunch_lines


def test_no_warning_is_repeated_or_about_a_choice_of_the_program(outcome):
    assert len(outcome.cpulaunch_lines) == len(REFUSED)
