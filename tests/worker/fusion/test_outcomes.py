"""The file of outcomes: what is written is read again, and nothing is believed that another user could have written."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cpulaunch.worker.fusion import outcomes  # noqa: E402
from cpulaunch.worker.fusion.outcomes import (  # noqa: E402
    UnusableError,
    add_outcomes,
    claim,
    note_request,
    open_folder,
    read_outcomes,
    version,
)
from cpulaunch.worker.fusion.search import TrialOutcome  # noqa: E402

pytestmark = pytest.mark.torch
KEYS = [letter * 64 for letter in "abcdef0123456789"]
KNOWN = {
    KEYS[0]: TrialOutcome(),
    KEYS[1]: TrialOutcome(left_out=frozenset({3, 17}), seconds=12.5),
    KEYS[2]: TrialOutcome(refusal="oneDNN Graph crashes (SIGSEGV)"),
    KEYS[3]: TrialOutcome(refusal="it could not be compiled in 60 s", cut_after=301.5),
    KEYS[4]: TrialOutcome(left_out=frozenset({3}), seconds=2.5, cut_after=301.5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cpulaunch" / "graphs"
    open_once(path)
    return path


def open_once(path: Path) -> None:
    with open_folder(str(path)):
        pass


def test_outcomes_are_read_as_written(folder: Path) -> None:
    add_outcomes(str(folder), KNOWN)
    assert read_outcomes(str(folder)) == KNOWN
    assert (folder / "outcomes").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == ["outcomes"]


def test_the_latest_outcomes_are_kept(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_ENTRIES", 2)
    add_outcomes(str(folder), {key: TrialOutcome() for key in KEYS})
    assert list(read_outcomes(str(folder))) == KEYS[-2:]


@pytest.mark.parametrize(
    "text",
    [
        *("", "another file", f"cpulaunch graphs 2\n{KEYS[0]}\tworks\t\t0.0\n"),
        *(f"cpulaunch graphs 3\n{KEYS[0]}\tworks\t1;2\t0.0\t0.0\n", f"cpulaunch graphs 3\n{KEYS[0]}\tworks\t1\n"),
        *(
            "cpulaunch graphs 3\nshort\tworks\t1\t0.0\t0.0\n",
            f"cpulaunch graphs 3\n{KEYS[0]}\tworks\t1\tnan\t0.0\n",
            f"cpulaunch graphs 3\n{KEYS[0]}\tother\t1\t0.0\t0.0\n",
            "\0" * 100,
        ),
    ],
)
def test_forged_contents_are_ignored(folder: Path, text: str) -> None:
    (folder / "outcomes").write_text(text)
    assert read_outcomes(str(folder)) == {}


def test_a_file_that_others_could_have_written_is_ignored(folder: Path) -> None:
    add_outcomes(str(folder), KNOWN)
    (folder / "outcomes").chmod(0o620)
    assert read_outcomes(str(folder)) == {}


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    add_outcomes(str(folder), KNOWN)
    (folder / "outcomes").rename(tmp_path / "elsewhere")
    (folder / "outcomes").symlink_to(tmp_path / "elsewhere")
    assert read_outcomes(str(folder)) == {}


def test_a_pipe_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "outcomes", 0o600)
    assert read_outcomes(str(folder)) == {}


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(UnusableError, match="other users can write"):
        open_once(folder)


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnusableError, match="belongs to another user"):
        open_once(folder)


def test_a_link_to_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(UnusableError, match="is not a folder"):
        open_once(link)


def test_outcomes_are_added_to_those_of_other_processes(folder: Path) -> None:
    add_outcomes(str(folder), {KEYS[0]: TrialOutcome()})
    before = version(str(folder))
    add_outcomes(str(folder), {KEYS[1]: TrialOutcome()})
    assert list(read_outcomes(str(folder))) == KEYS[:2]
    assert version(str(folder)) != before


WRITER = """
import sys
from cpulaunch.worker.fusion.outcomes import add_outcomes
from cpulaunch.worker.fusion.search import TrialOutcome
for number in range(20):
    add_outcomes(sys.argv[1], {f"{int(sys.argv[2]) * 20 + number:064x}": TrialOutcome()})
"""


def test_processes_that_write_at_once_lose_nothing(folder: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(number)]) for number in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(read_outcomes(str(folder))) == 60
    assert [path.name for path in folder.iterdir()] == ["outcomes"]


def test_a_temporary_file_of_the_same_process_id_elsewhere_is_not_touched(folder: Path) -> None:
    other = folder / f"outcomes.{os.getpid()}"
    other.write_text("half")
    add_outcomes(str(folder), KNOWN)
    assert other.read_text() == "half"


def test_a_line_that_is_cut_off_is_ignored(folder: Path) -> None:
    add_outcomes(str(folder), {KEYS[0]: TrialOutcome(), KEYS[1]: TrialOutcome(left_out=frozenset({3, 17}))})
    path = folder / "outcomes"
    path.write_text(path.read_text()[:-2])  # "3,1" would be another set of operations.
    assert list(read_outcomes(str(folder))) == KEYS[:1]


def test_a_file_is_read_to_its_end(folder: Path, monkeypatch) -> None:
    add_outcomes(str(folder), KNOWN)
    plain = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: plain(fd, min(size, 50)))
    assert read_outcomes(str(folder)) == KNOWN


def test_no_more_is_written_than_is_read(folder: Path) -> None:
    many = frozenset(range(10_000, 20_000))
    add_outcomes(str(folder), {f"{number:064x}": TrialOutcome(left_out=many) for number in range(30)})
    assert f"{29:064x}" in read_outcomes(str(folder))


def test_requests_are_counted_by_starts(folder: Path, monkeypatch) -> None:
    now = [1_700_000_000.7]
    monkeypatch.setattr(outcomes, "time", SimpleNamespace(time=lambda: now[0]))

    def started_and_asked(key: str = KEYS[0], *, ago: int = 5) -> int:
        return note_request(str(folder), key, started=int(now[0]) - ago)

    assert [started_and_asked() for _ in range(3)] == [0, 0, 0], "instances of one launch"
    for earlier in (1, 2, 3):
        now[0] += 60
        assert [started_and_asked(), started_and_asked()] == [earlier, earlier]
    assert (folder / "requests").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(outcomes, "MAX_ENTRIES", 2)
    assert [started_and_asked(key) for key in KEYS[1:3]] == [0, 0]
    assert started_and_asked() == 0, "it was forgotten"
    now[0] -= 1000
    assert [started_and_asked(KEYS[2]), started_and_asked(KEYS[2])] == [1, 1], "the clock was set back"
    now[0] += 60
    assert started_and_asked(KEYS[2]) == 2


@pytest.mark.parametrize(
    "text", ["", "1", "cpulaunch graphs asked for 2\nshort\t1\t1\n", f"cpulaunch graphs asked for 1\n{KEYS[0]}\t1\n"]
)
def test_malformed_requests_are_none(folder: Path, text: str) -> None:
    (folder / "requests").write_text(text)
    (folder / "requests").chmod(0o600)
    assert note_request(str(folder), KEYS[0], started=0) == 0
    assert note_request(str(folder), KEYS[0], started=1 << 40) == 1
    header, line = (folder / "requests").read_text().splitlines()
    assert (header, line[:65], line[-2:]) == ("cpulaunch graphs asked for 2", f"{KEYS[0]}\t", "\t2")


def test_a_claim_is_held_by_one_process(folder: Path) -> None:
    code = (
        "import sys; from cpulaunch.worker.fusion.outcomes import claim\n"
        "with claim(sys.argv[1], sys.argv[2], lambda: False): print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder), KEYS[0]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        asked: list[None] = []
        with claim(str(folder), KEYS[1], lambda: bool(asked.append(None))):
            assert not asked
        with claim(str(folder), KEYS[0], lambda: not asked.append(None)):
            assert asked
        holder.send_signal(signal.SIGKILL)
    asked.clear()
    with claim(str(folder), KEYS[0], lambda: bool(asked.append(None))):
        assert not asked


def test_file_systems_without_locks_can_be_used(folder: Path, monkeypatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    with claim(str(folder), KEYS[0], lambda: False):
        add_outcomes(str(folder), KNOWN)
    assert read_outcomes(str(folder)) == KNOWN


@pytest.mark.parametrize("name", ["write", "close", "replace", "unlink"])
def test_a_full_disk_keeps_what_is_known(folder: Path, monkeypatch, name: str) -> None:
    """Network file systems report it when the file is closed."""
    add_outcomes(str(folder), KNOWN)
    refused = {"write", "unlink"} if name == "unlink" else {name}
    written: list[int] = []
    plain_open, plain_close = os.open, os.close

    def opened(path: str, flags: int, *arguments: int, **named: int) -> int:
        fd = plain_open(path, flags, *arguments, **named)
        written.extend([fd] if flags & os.O_CREAT else [])
        return fd

    def refuse(fd: object, *arguments: object, **named: object) -> None:
        if name == "close":
            plain_close(fd)
            if fd not in written:
                return
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", opened)
    for each in refused:
        monkeypatch.setattr(os, each, refuse)
    add_outcomes(str(folder), {KEYS[3]: TrialOutcome()})
    monkeypatch.undo()
    assert read_outcomes(str(folder)) == KNOWN
    assert len(list(folder.iterdir())) == (2 if name == "unlink" else 1)
