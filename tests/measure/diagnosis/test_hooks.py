"""The hooks, each installed in a process of its own: what they see, and that compiled programs run as without them."""

import json
import os
import textwrap

import pytest

from tests.forked import Forked

pytest.importorskip("torch")

START = """
    import json, os, sys
    import torch
    from torch import distributed, nn
    from torch.utils.data import DataLoader, Dataset, TensorDataset
    from cpulaunch.worker.diagnosis import hooks
    from cpulaunch.worker.diagnosis.activity import Activity

    calls, activity = [], Activity()

    def ended(kind, key, seconds=0.0):
        calls.append(kind)

    if sys.argv[1] == "hooked":
        hooks.hook_modules(activity, ended)
        hooks.hook_optimizers(activity, ended)
        hooks.hook_backward(activity, ended)
        hooks.hook_loaders(activity, ended, lambda *seconds: None)
        hooks.hook_collectives(activity)
"""


def run(code, tmp_path, *, how="hooked"):
    """What the program prints as JSON."""
    text = textwrap.dedent(START) + textwrap.dedent(code)
    (tmp_path / "program.py").write_text(text)
    program = Forked(["program.py", how], dict(os.environ), modules=("torch",), folder=tmp_path)
    try:
        out, err = program.communicate(timeout=240)
    finally:
        program.kill()
    assert program.returncode == 0, err
    return json.loads(out.splitlines()[-1])


COMPILED = {
    "own module": """
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(4, 4)

            def forward(self, x):
                return self.inner(x).relu() * 0 + 1

        result = torch.compile(Own(), backend="eager", fullgraph=True)(torch.ones(1, 1, 4)).mean()
    """,
    "function around a module": """
        inner = nn.Linear(4, 4)

        @torch.compile(backend="eager", fullgraph=True)
        def called(x):
            return inner(x) * 0 + 1

        result = called(torch.ones(1, 4)).mean()
    """,
    "module": """
        model = torch.compile(nn.Linear(4, 4), backend="eager", fullgraph=True)
        result = model(torch.ones(2, 4)).sum() * 0 + 1
    """,
    "optimizer": """
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.grad = torch.ones(4)
        torch.compile(optimizer.step, backend="eager")()  # torch itself breaks the graph before the step.
        result = weight.detach().sum() / 2
    """,
    "collective": """
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

        @torch.compile(backend="eager", fullgraph=True)
        def reduced(tensor):
            distributed.all_reduce(tensor)
            return tensor * 2

        result = reduced(torch.ones(1)).sum() / 2
    """,
}


COMPILED["gradient"] = """
    weight = torch.ones(2, requires_grad=True)

    @torch.compile(backend="eager")
    def gradient(x):
        return torch.autograd.grad((weight * x).sum(), weight)[0] * 2

    result = gradient(torch.ones(2)).mean() / 2
"""


@pytest.mark.parametrize("name", COMPILED)
def test_what_compiles_does_so_with_hooks(name, tmp_path):
    assert run(f"{textwrap.dedent(COMPILED[name])}\nprint(json.dumps(float(result)))", tmp_path) == 1.0


def test_what_compiles_does_so_without_hooks(tmp_path):
    """All in one process, as the compiler takes seconds to import."""
    codes = (f"{textwrap.dedent(code)}\nresults.append(float(result))" for code in COMPILED.values())
    code = "\n".join(["results = []", *codes, "print(json.dumps(results))"])
    assert run(code, tmp_path, how="plain") == [1.0] * len(COMPILED)


def test_an_exception_of_the_program_passes_through(tmp_path):
    code = """
        class Broken(nn.Module):
            def forward(self, x):
                raise KeyError("mine")

        class Wrong(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                raise IndexError("sample")

        seen = []
        for call in (lambda: Broken()(1), lambda: list(DataLoader(Wrong())), lambda: torch.ones(2).backward()):
            try:
                call()
            except Exception as error:
                seen.append(type(error).__name__)
        print(json.dumps([seen, activity.now]))
    """
    assert run(code, tmp_path) == run(code, tmp_path, how="plain") == [["KeyError", "IndexError", "RuntimeError"], ""]


def test_gradients_that_are_returned_are_a_backward_pass_too(tmp_path):
    code = """
        weight = torch.ones(2, requires_grad=True)
        torch.autograd.grad(weight.sum(), weight)
        weight.sum().backward()
        print(json.dumps([calls, activity.totals["backward_seconds"] > 0]))
    """
    assert run(code, tmp_path) == [["backward", "backward"], True]


def test_what_a_closure_computes_is_told_from_the_optimizer(tmp_path):
    code = """
        regions = []

        class Region:
            def __init__(self, name):
                regions.append(name)

            def __enter__(self):
                pass

            def __exit__(self, *_):
                pass

        point = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.LBFGS([point], max_iter=2)

        def closure():
            optimizer.zero_grad()
            loss = nn.MSELoss()(point, torch.zeros(2))
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.step(closure=closure)
        assert not regions
        activity.record = Region
        first = float(optimizer.step(closure))
        second = float(optimizer.step(closure=closure))
        print(json.dumps([sorted(set(regions)), second <= first]))
    """
    assert run(code, tmp_path) == [["cpulaunch::backward", "cpulaunch::closure", "cpulaunch::function"], True]


def test_a_module_may_have_other_parameters(tmp_path):
    code = """
        from contextlib import nullcontext

        regions = []
        activity.record = lambda name: regions.append(name) or nullcontext()

        class Own(nn.Module):
            def parameters(self, unit):
                return 3

            def forward(self, x):
                return x

        for module in (Own(), nn.ReLU(), nn.Linear(2, 2)):
            module(torch.ones(2))
        print(json.dumps(regions))
    """
    assert run(code, tmp_path) == ["cpulaunch::module", "cpulaunch::function", "cpulaunch::module"]


def test_a_model_without_parameters_is_one_and_its_calls_end_steps(tmp_path):
    pytest.importorskip("torch.ao.nn.quantized.dynamic")
    code = """
        import warnings
        from contextlib import nullcontext

        warnings.simplefilter("ignore")  # Quantized modules and scripts are deprecated.
        from torch.ao.nn.quantized import dynamic

        regions = []
        activity.record = lambda name: regions.append(name.removeprefix("cpulaunch::")) or nullcontext()

        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.ones(2))

            def forward(self, x):
                return x * self.scale

        class FarLoss(Scaled):
            pass

        quantized = nn.Sequential(dynamic.Linear(2, 2))
        frozen = torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval()))
        traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
        scripted_loss = torch.jit.script(nn.MSELoss())
        found = {}
        for name, module in locals().copy().items():
            if isinstance(module, nn.Module):
                calls.clear(), regions.clear()
                module(*[torch.ones(1, 2)] * (1 + name.endswith("loss")))
                found[name] = [*regions, *calls]
        for module in (Scaled(), FarLoss()):
            regions.clear()
            module(torch.ones(2))
            found[type(module).__name__] = regions[:]
        regions.clear()
        nn.CrossEntropyLoss(weight=torch.ones(2))(torch.ones(1, 2), torch.tensor([0]))
        print(json.dumps(found | {"classes": regions}))
    """
    model, loss = ["module", "module"], ["function", "module"]
    assert run(code, tmp_path) == {
        **dict.fromkeys(("quantized", "frozen", "traced"), model),
        "scripted_loss": loss,
        "Scaled": ["module"],
        "FarLoss": ["function"],
        "classes": ["function"],
    }


def test_the_last_loader_is_the_one_that_is_known(tmp_path):
    code = """
        for _ in DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4):
            pass
        before = [activity.loader_workers, activity.batch_bytes]
        data = TensorDataset(torch.ones(8, 64))
        for _ in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork"):
            pass
        print(json.dumps([before, [activity.loader_workers, activity.batch_bytes]]))
    """
    assert run(code, tmp_path) == [[0, 32], [1, 1024]]


def test_starting_the_workers_of_an_epoch_is_waiting_for_data(tmp_path):
    code = """
        import time

        class Slow(DataLoader):
            def _get_iterator(self):
                time.sleep(0.2)
                return super()._get_iterator()

        iter(Slow(TensorDataset(torch.ones(4))))
        print(json.dumps(activity.totals["data_seconds"]))
    """
    assert run(code, tmp_path) >= 0.2


def test_a_batch_of_any_class_is_passed_on(tmp_path):
    code = """
        class Strange(torch.Tensor):
            def numel(self):
                raise RuntimeError("no")

        strange = torch.ones(2).as_subclass(Strange)
        found = next(iter(DataLoader([1, 2], batch_size=2, collate_fn=lambda each: strange)))
        print(json.dumps(type(found).__name__))
    """
    assert run(code, tmp_path) == "Strange"


def test_a_program_may_mark_its_operations_for_another_profiler(tmp_path):
    code = """
        from torch.autograd import profiler
        from cpulaunch.worker.diagnosis.window import ProfilerWindow

        window = ProfilerWindow()
        hooks.hook_profilers(window.give_way)
        window.start()
        with profiler.emit_itt():
            torch.ones(2).add_(1)
        window.stop()
        print(json.dumps([window.failure, window.sums()]))
    """
    assert run(code, tmp_path) == ["the program uses torch's profiler itself", None]


def test_scripts_may_compute_gradients(tmp_path):
    """torch.jit.script compiles what it does not know as built in."""
    code = """
        @torch.jit.script
        def gradient(x: torch.Tensor):
            found = torch.autograd.grad([(x * x).sum()], [x])[0]
            torch.autograd.backward([(x * 3).sum()])
            return found

        x = torch.ones(3, requires_grad=True)
        print(json.dumps([gradient(x).tolist(), x.grad.tolist()]))
    """
    expected = run(code, tmp_path, how="plain")
    assert expected == [[2.0] * 3, [3.0] * 3]
    assert run(code, tmp_path) == expected


def test_what_an_optimizer_takes_stays_what_it_is(tmp_path):
    code = """
        class Own(torch.optim.SGD):
            def step(self, model):
                return [type(model).__name__, len(list(model.parameters()))]

        model = nn.Linear(2, 2)
        activity.record = torch.autograd.profiler.record_function
        print(json.dumps(Own(model.parameters(), lr=0.1).step(model)))
    """
    assert run(code, tmp_path) == ["Linear", 2]
