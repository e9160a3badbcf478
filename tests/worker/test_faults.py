"""A setting that fails in the worker prints one warning and changes nothing; under --strict the exit code is 125."""

import pytest

from cpulaunch.records.torch_settings import TorchSettings, encode
from cpulaunch.worker.apply import PLUGIN_SETTINGS
from tests.worker.applying import case, events, run_cases, run_python

pytestmark = pytest.mark.torch

BROKEN = """
    def broken(*arguments, **named):
        raise RuntimeError("broken on purpose")
"""
NO_DATASETS = "import torch.utils.data; del torch.utils.data.IterableDataset"
NO_GPU = "torch.version.cuda = torch.version.hip = None"

FAULTS = {
    # row: (the settings that request it, what makes it fail, the name in the warning)
    "report": ({}, "sys.modules['cpulaunch.worker.reporting.exit_report'] = None", "--report"),
    "gloo_threads": ({}, "sys.modules['cpulaunch.worker.process.gloo_threads'] = None", "gloo threads"),
    "loopback_store": (
        {"loopback_store": True},
        "sys.modules['cpulaunch.worker.process.local_store'] = None",
        "loopback store",
    ),
    "rank_hint": ({}, "sys.modules['cpulaunch.worker.features.rank_hint'] = None", "rank hint"),
    "children": ({"cpus": "0"}, "import subprocess; del subprocess._fork_exec", "children"),
    "affinity": ({"loader_cpus": "0"}, "del torch.utils.data._utils.worker._worker_loop", "--affinity"),
    "threads": ({"threads": 3}, "torch.set_num_threads = broken", "--threads"),
    "interop_threads": ({"interop_threads": 2}, "torch.set_num_interop_threads = broken", "--interop-threads"),
    "precision": ({"precision": "tf32"}, "torch.set_float32_matmul_precision = broken", "--precision"),
    "flush_denormal": ({"flush_denormal": True}, "torch.set_flush_denormal = lambda on: False", "--flush-denormal"),
    "cudnn_benchmark": ({"cudnn_benchmark": True}, NO_GPU, "--cudnn-benchmark"),
    "debug_apis": ({"debug_apis": False}, "del torch.autograd.profiler.emit_nvtx", "--debug-apis"),
    "mmap_weights": ({"mmap_weights": True}, "del torch.serialization.load", "--mmap-weights"),
    "dataloader_workers": ({"dataloader_workers": 2}, NO_DATASETS, "--dataloader-workers"),
    "pin_memory": ({"pin_memory": True}, NO_GPU, "--pin-memory"),
    "prefetch": ({"prefetch": 4}, NO_DATASETS, "--prefetch"),
    "persistent_workers": ({"persistent_workers": True}, NO_DATASETS, "--persistent-workers"),
    "fused_optimizers": (
        {"fused_optimizers": True},
        "import torch.utils._foreach_utils as f; f._get_fused_kernels_supported_devices = broken",
        "--fused-optimizers",
    ),
    "ddp_bucket_mb": (
        {"ddp_bucket_mb": 5},
        "import torch.nn.parallel as p; p.DistributedDataParallel.__init__ = lambda self: None",
        "--ddp-bucket-mb",
    ),
    "compile_cache": (
        {"compile_cache": "threads-2"},
        "sys.modules['cpulaunch.worker.process.compile_cache'] = None",
        "compile cache",
    ),
    "ipex": ({"ipex": True}, "torch.__version__ = '0.0'", "--ipex"),
    "ccl": ({}, "sys.modules['cpulaunch.worker.ccl.registration'] = None", "ccl"),
    "dist_backend": (
        {"dist_backend": "mpi"},
        "import torch.distributed.distributed_c10d as c; c.is_mpi_available = lambda: False",
        "--dist-backend",
    ),
    "diagnosis": ({}, "import os; os.environ['CPULAUNCH_DIAGNOSIS'] = '{'", "diagnosis"),
    "calls": ({"inference_mode": True}, "sys.modules['cpulaunch.worker.features.module_calls'] = None", "calls"),
}
AT_RUN_TIME = {
    # what fails later: (settings, code that breaks it, program, text of the warning)
    "a loader": (
        {"pin_memory": True},
        "torch.version.cuda = '12'; torch.cuda.is_available = broken",
        "from torch.utils.data import DataLoader; DataLoader([1, 2])",
        "a DataLoader is left unchanged",
    ),
    "the report at exit": (
        {},
        "import cpulaunch.system.process_snapshot; cpulaunch.system.process_snapshot.snapshot = broken",
        "",
        "--report: RuntimeError",
    ),
    "CPUs that went offline": ({"cpus": "4095"}, "", "os.environ['OMP_PROC_BIND'] = 'true'; os.system('true')", None),
}
INVALID = ("", "{", "[]", "null", "nonsense")


def breaking(name, *, strict):
    settings, breaker, _ = FAULTS[name]
    return case("print('alive')", before=BROKEN + "\n    " + breaker, strict=strict, **settings)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    cases = {name: breaking(name, strict=False) for name in FAULTS}
    cases |= {f"strict {name}": breaking(name, strict=True) for name in FAULTS}
    cases |= {text: case("print('alive')", settings=text) for text in INVALID}
    for name, (settings, breaker, program, _) in AT_RUN_TIME.items():
        before = BROKEN + "\n    " + breaker
        cases[name] = case(program + "\nprint('alive')", before=before, **settings)
        cases[f"strict {name}"] = case(program, before=before, strict=True, **settings)
    return run_cases(cases, tmp_path_factory.mktemp("faults"))


def test_every_plugin_setting_has_a_fault():
    assert set(FAULTS) == {row.name for row in PLUGIN_SETTINGS}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_prints_one_warning(outcomes, name):
    outcome = outcomes[name]
    assert (outcome.code, outcome.out) == (0, "alive\n"), outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert outcome.err.startswith(f"cpulaunch: worker 0: warning: {FAULTS[name][2]}: ")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_under_strict_stops_the_worker(outcomes, name):
    outcome = outcomes[f"strict {name}"]
    assert (outcome.code, outcome.out) == (125, ""), outcome.err
    assert [line.startswith("cpulaunch: worker 0: ") for line in outcome.err.splitlines()] == [True, True]


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_a_fault_at_run_time_does_not_stop_the_program(outcomes, name):
    outcome, text = outcomes[name], AT_RUN_TIME[name][3]
    assert (outcome.code, outcome.out) == (0, "alive\n"), outcome.err
    assert len(outcome.err.splitlines()) == (text is not None)
    assert text is None or text in outcome.err


@pytest.mark.parametrize("name", [name for name, (*_, text) in AT_RUN_TIME.items() if text])
def test_a_fault_at_run_time_under_strict_stops_the_worker(outcomes, name):
    assert outcomes[f"strict {name}"].code == 125, outcomes[f"strict {name}"].err


@pytest.mark.parametrize("text", INVALID)
def test_an_invalid_variable_prints_one_warning_and_applies_nothing(outcomes, text):
    outcome = outcomes[text]
    assert (outcome.code, outcome.out) == (0, "alive\n"), outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert "settings: no settings are applied" in outcome.err


def test_child_processes_do_not_repeat_the_warning(tmp_path):
    program = tmp_path / "spawning.py"
    program.write_text(
        "import multiprocessing, torch\n"
        "def work(): print(torch.get_float32_matmul_precision())\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork'):\n"
        "        child = multiprocessing.get_context(method).Process(target=work)\n"
        "        child.start(); child.join()\n"
    )
    file = tmp_path / "events"
    file.touch()
    settings = encode(TorchSettings(precision="tf32", interop_threads=-1, index=3))
    outcome = run_python(program, env={"CPULAUNCH_WORKER": settings, "CPULAUNCH_EVENTS": str(file)})
    assert (outcome.code, outcome.out) == (0, "high\nhigh\n"), outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert "worker 3: warning: --interop-threads: " in outcome.err
    assert [event["event"] for event in events(file)] == ["degraded", "applied", "live", "conditions"]
