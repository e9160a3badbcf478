"""Which names stand for what is in the current folder, and which entries of PYTHONPATH are kept."""

import os

import pytest

import cpulaunch
from cpulaunch.system.files.paths import is_of_current_folder, without_relative_folders
from tests.strangers import UID, as_other_user, folder_of_stranger, needs_root

strangers = pytest.fixture(folder_of_stranger)


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


@needs_root
@pytest.mark.parametrize(("group", "mode", "is_meant"), [(UID, 0o2775, False), (0, 0o2775, True), (UID, 0o3775, True)])
def test_a_file_that_a_member_of_the_group_renamed_is_not_meant(
    tmp_path, strangers, monkeypatch, group, mode, is_meant
):
    os.chown(strangers, 0, group)
    strangers.chmod(mode)
    (strangers / "wipe_results.py").write_text("")
    monkeypatch.chdir(strangers)
    assert as_other_user(lambda: os.rename("wipe_results.py", "python")) == (mode == 0o2775 and group == UID)
    (strangers / "python").touch()
    assert is_of_current_folder("python") == is_meant


def test_of_relative_entries_of_pythonpath_one_that_leads_to_cpulaunch_is_made_absolute(tmp_path, monkeypatch):
    root = os.path.dirname(os.path.dirname(cpulaunch.__file__))
    monkeypatch.chdir(root)
    for path, kept in ((":/one", f"{root}:/one"), ("cpulaunch:./:/one", f"{root}:/one"), ("tests", None), ("", None)):
        environ = without_relative_folders({"PYTHONPATH": path, "A": "1"})
        assert environ == {"A": "1"} | ({} if kept is None else {"PYTHONPATH": kept})
    monkeypatch.chdir(tmp_path)
    assert without_relative_folders({"PYTHONPATH": ":."}) == {}
