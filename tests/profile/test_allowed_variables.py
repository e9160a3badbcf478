"""Which environment variables a profile may set: tuning variables, none that chooses which code runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.profile.file import parse_profile
from cpulaunch.records.errors import UsageError

HEAD = 'kind = "intent"\nsummary = "s"\n'


def profile(name: str, value: str = "1") -> str:
    return f'{HEAD}[env.{name}]\nvalue = "{value}"\nreason = "r"\n'


@pytest.mark.parametrize(
    "name",
    [
        *("CXX", "CC", "GCONV_PATH", "OMP_TOOL_LIBRARIES", "INTEL_LIBITTNOTIFY64", "FI_PROVIDER_PATH"),
        *("PATH", "PYTHONPATH", "LD_AUDIT", "HOME", "TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR", "NCCL_NET_PLUGIN"),
        *("MKL_VERBOSE_OUTPUT_FILE", "KMP_CPUINFO_FILE", "ONEDNN_JIT_DUMP", "HEAPPROFILE", "MY_OWN", "http_proxy"),
        *("GLOO_SOCKET_IFNAME", "CPULAUNCH_WORKER", "TORCHELASTIC_RUN_ID", "lru_cache_capacity"),
    ],
)
def test_a_variable_that_is_not_on_the_list_needs_the_command_line(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_profile(profile(name), name="p")
    assert f"--env {name}=VALUE" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_DEFAULT_FPMATH_MODE", "KMP_TPAUSE"),
        *("TORCH_MKLDNN_MATMUL_MIN_DIM", "PYTORCH_CUDA_ALLOC_CONF", "MIMALLOC_PURGE_DELAY", "OMP_STACKSIZE"),
    ],
)
def test_tuning_variables_may_be_set(name: str) -> None:
    assert parse_profile(profile(name), name="p").env[0].name == name


def test_jemallocs_profiler_cannot_be_switched_on() -> None:
    assert parse_profile(profile("MALLOC_CONF", "background_thread:true,dirty_decay_ms:10000"), name="p").env
    with pytest.raises(UsageError, match="--env MALLOC_CONF=VALUE"):
        parse_profile(profile("MALLOC_CONF", "retain:true, prof_prefix:/etc/cron.d/x"), name="p")


def test_profiles_validate_says_what_to_type(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(profile("CXX", "/tmp/evil"))
    command = [sys.executable, "-P", "-m", "cpulaunch", "profiles", "validate", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 2
    assert "a profile cannot set this variable" in done.stderr
    assert "--env CXX=VALUE" in done.stderr
