"""Search for oneCCL, its settings, and the errors if it is missing; these tests need neither torch nor oneCCL."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.worker.ccl.oneccl import library
from cpulaunch.worker.ccl.wire.errors import CclError

LIBRARIES = "/venv/lib"
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def settings(environ, libraries=LIBRARIES):
    return library.settings(environ, str(libraries))


def test_variables_of_the_user_are_not_overridden():
    assert "CCL_ATL_SHM" not in settings({"CCL_ATL_SHM": "0"})
    assert settings({"CCL_ATL_SHM": "0"})["CCL_WORKER_OFFLOAD"] == "0"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"LOCAL_RANK": "1"}, {}),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {"CCL_LOCAL_RANK": "1", "CCL_LOCAL_SIZE": "2"}),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CCL_LOCAL_RANK": "0"}, {"CCL_LOCAL_SIZE": "2"}),
    ],
)
def test_local_ranks_come_from_the_launch(environ, expected):
    assert {name: value for name, value in settings(environ).items() if name.startswith("CCL_LOCAL")} == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"CCL_ATL_TRANSPORT": "ofi", "FI_PROVIDER": "tcp"}),
        ({"I_MPI_HYDRA_UUID": "3", "PMI_RANK": "1"}, {"CCL_ATL_TRANSPORT": "ofi", "FI_PROVIDER": "tcp"}),
        ({"FI_PROVIDER": "verbs"}, {"CCL_ATL_TRANSPORT": "ofi"}),
    ],
)
def test_the_transport_is_tcp_unless_the_user_chooses_a_fabric(environ, expected):
    names = ("CCL_ATL_TRANSPORT", "FI_PROVIDER")
    assert {name: value for name, value in settings(environ).items() if name in names} == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0,eth0"}, {"CCL_KVS_IFACE": "ib0", "CCL_MNIC_NAME": "ib0,eth0"}),
        ({"GLOO_SOCKET_IFNAME": "ib0", "CCL_KVS_IFACE": "eth0"}, {"CCL_MNIC_NAME": "ib0"}),
        ({"GLOO_SOCKET_IFNAME": "ib0", "FI_PROVIDER": "verbs"}, {"CCL_KVS_IFACE": "ib0"}),
        ({"MASTER_ADDR": "127.0.0.1"}, {"CCL_KVS_IFACE": "lo", "CCL_MNIC_NAME": "lo"}),
        ({"MASTER_ADDR": "no.such.host.invalid", "WORLD_SIZE": "2"}, {}),
        ({}, {}),
    ],
)
def test_the_interface_is_that_of_gloo(environ, expected):
    names = ("CCL_KVS_IFACE", "CCL_MNIC_NAME")
    assert {name: value for name, value in settings(environ).items() if name in names} == expected


def with_files(root, *files):
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def test_libfabric_of_the_same_folder_is_used_unless_an_intel_mpi_has_its_own(tmp_path):
    lib = with_files(tmp_path, "lib/libfabric.so.1") / "lib"

    def chosen(**environ):
        names = ("CCL_OFI_LIBRARY_PATH", "FI_PROVIDER_PATH")
        return {name: value for name, value in settings(environ, lib).items() if name in names}

    assert chosen() == {"CCL_OFI_LIBRARY_PATH": f"{lib}/libfabric.so.1", "FI_PROVIDER_PATH": str(lib)}
    assert chosen(I_MPI_OFI_LIBRARY="/opt/libfabric.so") == {"FI_PROVIDER_PATH": str(lib)}
    assert chosen(I_MPI_ROOT="/opt/mpi") == {}


def test_the_error_for_a_missing_library_names_the_package(tmp_path):
    with pytest.raises(CclError, match="oneCCL is not installed") as caught:
        library.folder("no-such-distribution", str(tmp_path))
    assert "pip install 'cpulaunch[ccl]'" in str(caught.value)


def test_a_version_without_the_c_api_is_an_error(tmp_path):
    with pytest.raises(CclError, match="oneCCL is too old"):
        library.folder("pytest", str(tmp_path))


def test_a_library_under_the_prefix_is_found(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / library.API).touch()
    assert library.folder("no-such-distribution", str(tmp_path)) == str(tmp_path / "lib")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("order", [("first", "second", "third"), ("third", "second", "first")])
def test_libraries_are_loaded_after_those_they_need(tmp_path, order):
    """tcmlib 1.6 needs libhwloc and finds it only if it is loaded already; other versions need others."""
    names = {"third": [], "second": ["third"], "first": ["second"]}
    for name, needed in names.items():
        source = tmp_path / f"{name}.c"
        source.write_text(f"int {name}_of_a_test(void) {{ return 0; }}")
        links = [f"-l:lib{each}_of_{tmp_path.name}.so" for each in needed]
        target = tmp_path / f"lib{name}_of_{tmp_path.name}.so"
        command = [COMPILER, "-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-soname,{target.name}", "-o", target]
        subprocess.run([*command, source, f"-L{tmp_path}", *links], check=True)
    library.open_all([str(tmp_path / f"lib{name}_of_{tmp_path.name}.so") for name in order])


def test_the_error_names_a_library_that_cannot_be_loaded(tmp_path):
    (tmp_path / "libno.so").write_text("not a library")
    with pytest.raises(CclError, match=r"libno\.so"):
        library.open_all([str(tmp_path / "libno.so")])


LIBRARIES_OF_ONECCL = next(iter(Path(sys.prefix).glob("lib/libccl.so.2")), None)


@pytest.mark.skipif(LIBRARIES_OF_ONECCL is None, reason="oneCCL is not installed")
def test_oneccl_of_todays_packages_is_loaded_without_ld_library_path():
    code = "from cpulaunch.worker.ccl.oneccl import library; print(library.version())"
    environ = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("202")


def test_stdout_goes_to_stderr_while_oneccl_warns(capfd):
    with library.stdout_on_stderr():
        os.write(1, b"a warning")
    os.write(1, b"a result")
    assert capfd.readouterr() == ("a result", "a warning")


def test_a_process_without_stdout_is_supported():
    kept = os.dup(1)
    os.close(1)
    try:
        with library.stdout_on_stderr():
            assert os.open(os.devnull, os.O_WRONLY) == 1  # Descriptor 1 is still free.
            os.close(1)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
