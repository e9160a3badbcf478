"""Which names stand for what is in the current folder, and which entries of PYTHONPATH are kept."""

import os

import pytest

import cpulaunch
from cpulaunch.system.files.paths import is_of_current_folder, without_relative_folders


@pytest.mark.parametrize(
    ("folder", "mode", "names", "is_meant"),
    [
        (0o1777, 0o755, 1, True),
        (0o1777, 0o755, 2, False),
        (0o1777, 0o666, 1, False),
        (0o755, 0o666, 2, True),
        (0o775, 0o777, 2, True),
    ],
)
def test_a_name_that_anyone_may_have_given_or_written_is_not_meant(
    tmp_path, monkeypatch, folder, mode, names, is_meant
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").write_text("")
    (tmp_path / "python").chmod(mode)
    if names == 2:
        os.link(tmp_path / "python", tmp_path / "other")
    tmp_path.chmod(folder)
    assert is_of_current_folder("python") == is_meant
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv").chmod(0o777)  # As some mounts show all folders.
    assert is_of_current_folder("venv")


def test_of_relative_entries_of_pythonpath_one_that_leads_to_cpulaunch_is_made_absolute(tmp_path, monkeypatch):
    root = os.path.dirname(os.path.dirname(cpulaunch.__file__))
    monkeypatch.chdir(root)
    for path, kept in ((":/one", f"{root}:/one"), ("cpulaunch:./:/one", f"{root}:/one"), ("tests", None), ("", None)):
        environ = without_relative_folders({"PYTHONPATH": path, "A": "1"})
        assert environ == {"A": "1"} | ({} if kept is None else {"PYTHONPATH": kept})
    monkeypatch.chdir(tmp_path)
    assert without_relative_folders({"PYTHONPATH": ":."}) == {}
