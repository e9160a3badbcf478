"""The MKL dispatch library replaces the function of MKL inside a real torch."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cpulaunch
from cpulaunch.launch.trial import try_preloads

SOURCE = Path(__file__).parents[2] / "cpulaunch/lib/mkl_dispatch.c"
INSTALLED = Path(cpulaunch.__path__[0], "lib/libcpulaunch_mkl.so")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
SYMBOL = "mkl_serv_intel_cpu_true"

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(
        sys.platform != "linux" or os.uname().machine != "x86_64", reason="MKL's dispatch concerns x86_64 Linux"
    ),
]

MULTIPLY = """
import torch
torch.manual_seed(0)
left, right = torch.randn(300, 200), torch.randn(200, 100)
exact = left.double() @ right.double()
assert (left @ right - exact).abs().max() < 1e-4
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    target = tmp_path / "libcpulaunch_mkl.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O2", "-o", target, SOURCE], check=True)
    return target


def run_python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )


def test_preloaded_function_is_the_process_wide_one(library: Path) -> None:
    code = f"import ctypes; print(ctypes.CDLL(None).{SYMBOL}())"
    assert run_python(code, {"LD_PRELOAD": str(library)}).stdout == "1\n"


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_mkl_inside_torch_calls_the_preloaded_function(library: Path, tmp_path: Path) -> None:
    import torch

    if not torch.backends.mkl.is_available():
        pytest.skip("this torch is built without MKL")
    bindings = tmp_path / "bindings"
    environment = {"LD_PRELOAD": str(library), "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(bindings)}
    run_python(MULTIPLY, environment)
    lines = [line for log in tmp_path.glob("bindings.*") for line in log.read_text().splitlines() if SYMBOL in line]
    assert any("libtorch_cpu.so" in line and f"to {library}" in line for line in lines), lines


def test_library_passes_the_trial_of_preloads(library: Path) -> None:
    failures = try_preloads([str(library)], interpreter=sys.executable, environ=dict(os.environ), cache_file=None)
    assert failures == {str(library): None}


@pytest.mark.torch
@pytest.mark.skipif(not INSTALLED.exists(), reason="cpulaunch was installed without a compiler")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_mkl_dispatch_on_preloads_the_library(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os; print(os.environ['LD_PRELOAD'])")
    command = [sys.executable, "-m", "cpulaunch", "--mkl-dispatch", "on", "--instances", "1", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=SOURCE.parents[2])
    assert result.returncode == 0, result.stderr
    assert str(INSTALLED) in result.stdout
