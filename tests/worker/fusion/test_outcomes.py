"""The file of outcomes: what is written is read again, and nothing is believed that another user could have written."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cpulaunch.worker.fusion import outcomes  # noqa: E402
from cpulaunch.worker.fusion.outcomes import UnusableError, open_folder, read_outcomes, write_outcomes  # noqa: E402
from cpulaunch.worker.fusion.search import TrialOutcome  # noqa: E402

pytestmark = pytest.mark.torch
KEYS = [letter * 64 for letter in "abcdef0123456789"]
KNOWN = {
    KEYS[0]: TrialOutcome(),
    KEYS[1]: TrialOutcome(left_out=frozenset({3, 17})),
    KEYS[2]: TrialOutcome(refusal="oneDNN Graph crashes (SIGSEGV)"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cpulaunch" / "graphs"
    open_folder(str(path))
    return path


def test_outcomes_are_read_as_written(folder: Path) -> None:
    write_outcomes(str(folder), KNOWN)
    assert read_outcomes(str(folder)) == KNOWN
    assert (folder / "outcomes").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == ["outcomes"]


def test_the_latest_outcomes_are_kept(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_ENTRIES", 2)
    write_outcomes(str(folder), {key: TrialOutcome() for key in KEYS})
    assert list(read_outcomes(str(folder))) == KEYS[-2:]


@pytest.mark.parametrize(
    "text",
    [
        *("", "another file", f"cpulaunch graphs 2\n{KEYS[0]}\tworks\t\n"),
        *(f"cpulaunch graphs 1\n{KEYS[0]}\tworks\t1;2\n", f"cpulaunch graphs 1\n{KEYS[0]}\tworks\t-1\n"),
        *("cpulaunch graphs 1\nshort\tworks\t1\n", f"cpulaunch graphs 1\n{KEYS[0]}\tother\t1\n", "\0" * 100),
    ],
)
def test_forged_contents_are_ignored(folder: Path, text: str) -> None:
    (folder / "outcomes").write_text(text)
    assert read_outcomes(str(folder)) == {}


def test_a_file_that_others_could_have_written_is_ignored(folder: Path) -> None:
    write_outcomes(str(folder), KNOWN)
    (folder / "outcomes").chmod(0o620)
    assert read_outcomes(str(folder)) == {}


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    write_outcomes(str(folder), KNOWN)
    (folder / "outcomes").rename(tmp_path / "elsewhere")
    (folder / "outcomes").symlink_to(tmp_path / "elsewhere")
    assert read_outcomes(str(folder)) == {}


def test_a_pipe_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "outcomes", 0o600)
    assert read_outcomes(str(folder)) == {}


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(UnusableError, match="other users can write"):
        open_folder(str(folder))


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnusableError, match="belongs to another user"):
        open_folder(str(folder))


def test_a_link_to_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(UnusableError, match="is not a folder"):
        open_folder(str(link))
