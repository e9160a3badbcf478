"""Where oneCCL is looked for, what it is told, and what is said without it: without torch, without the library."""

import pytest

from cpulaunch.worker.ccl import library
from cpulaunch.worker.ccl.errors import CclError


def test_what_the_user_has_set_stays():
    assert "CCL_ATL_SHM" not in library.settings({"CCL_ATL_SHM": "0"})
    assert library.settings({"CCL_ATL_SHM": "0"})["CCL_WORKER_OFFLOAD"] == "0"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"LOCAL_RANK": "1"}, {}),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {"CCL_LOCAL_RANK": "1", "CCL_LOCAL_SIZE": "2"}),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CCL_LOCAL_RANK": "0"}, {"CCL_LOCAL_SIZE": "2"}),
    ],
)
def test_local_ranks_are_the_launchs(environ, expected):
    told = library.settings(environ)
    assert {name: told[name] for name in told if name.startswith("CCL_LOCAL")} == expected


def test_a_missing_library_names_the_package(tmp_path):
    with pytest.raises(CclError, match="oneCCL is not installed") as caught:
        library.folder("no-such-distribution", str(tmp_path))
    assert "pip install 'cpulaunch[ccl]'" in str(caught.value)


def test_an_old_library_names_its_version(tmp_path):
    with pytest.raises(CclError, match="oneCCL is too old"):
        library.folder("pytest", str(tmp_path))


def test_a_library_is_found_under_the_prefix(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / library.API).touch()
    assert library.folder("no-such-distribution", str(tmp_path)) == str(tmp_path / "lib")
