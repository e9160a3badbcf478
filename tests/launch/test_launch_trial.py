"""A library is preloaded only if the interpreter starts with it, and the result is cached."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.launch import trial
from cpulaunch.launch.trial import MAX_BYTES, TIMED_OUT, read_verdicts, try_preloads, write_verdicts
from tests.launch.launching import alive, eventually

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")


@pytest.fixture
def library():
    """A library that this interpreter has loaded or can load: it is on this machine by definition."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[-1] for line in maps if ".so" in line]
    return next(path for path in mapped if os.path.basename(path).startswith(("libc.", "libc-", "libm")))


@pytest.fixture
def counting(tmp_path):
    """An interpreter that counts its starts."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\necho x >> {tmp_path}/starts\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def starts(tmp_path):
    path = tmp_path / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def attempt(path, tmp_path, *, interpreter=sys.executable, environ=None, cache_file="cache/trials"):
    cache = cache_file and str(tmp_path / cache_file)
    return try_preloads([str(path)], interpreter=interpreter, environ=environ or {}, cache_file=cache)[str(path)]


def test_a_library_that_loads_is_accepted(library, tmp_path):
    assert attempt(library, tmp_path) is None


def test_a_library_whose_path_is_no_text_is_accepted(library, tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.so")
    shutil.copy(library, path)
    assert attempt(path, tmp_path, cache_file=None) is None


def test_a_trial_has_an_exit_code_where_the_parent_ignored_the_end_of_children(library, tmp_path):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert attempt(library, tmp_path) is None
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_missing_library_is_refused_with_the_loaders_message(tmp_path):
    assert "cannot open shared object file" in attempt("/no/such.so", tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path):
    (tmp_path / "lib.so").write_text("text")
    assert "cannot be preloaded" in attempt(tmp_path / "lib.so", tmp_path)


def test_a_path_that_the_variable_cannot_express_is_refused(tmp_path):
    assert "space or colon" in attempt("/a b/lib.so", tmp_path)


def test_an_interpreter_that_fails_is_refused(library, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho the reason >&2\nexit 9\n")
    broken.chmod(0o755)
    assert attempt(library, tmp_path, interpreter=str(broken)) == "the trial start ended with exit code 9: the reason"


def test_an_interpreter_that_crashes_is_refused(library, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nkill -SEGV $$\n")
    broken.chmod(0o755)
    assert "was killed by signal 11" in attempt(library, tmp_path, interpreter=str(broken))


def test_an_interpreter_that_does_not_load_it_is_refused(library, tmp_path):
    silent = tmp_path / "python"
    silent.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {sys.executable} -I -S -c "raise SystemExit(77)"\n')
    silent.chmod(0o755)
    assert attempt(library, tmp_path, interpreter=str(silent)) == "the interpreter starts without loading it"


@pytest.mark.parametrize("command", ["yes >&2", "sleep 600 2>&-"], ids=["writes", "closes its stderr"])
def test_an_interpreter_without_end_is_refused_after_the_time_limit(library, tmp_path, monkeypatch, command):
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.5)
    endless = tmp_path / "python"
    endless.write_text(f"#!/bin/sh\nexec {command}\n")
    endless.chmod(0o755)
    assert attempt(library, tmp_path, interpreter=str(endless)) == TIMED_OUT


def test_a_missing_interpreter_is_refused(library, tmp_path):
    assert "cannot be started" in attempt(library, tmp_path, interpreter="/no/python")


def test_the_users_own_preload_is_tried_too(library, tmp_path):
    shows = tmp_path / "python"
    shows.write_text('#!/bin/sh\necho "$LD_PRELOAD" >&2\nexit 1\n')
    shows.chmod(0o755)
    said = attempt(library, tmp_path, interpreter=str(shows), environ={"LD_PRELOAD": library})
    assert said.endswith(f"{library}:{library}")


def test_a_cached_verdict_starts_nothing(library, counting, tmp_path):
    assert attempt(library, tmp_path, interpreter=counting) is None
    assert starts(tmp_path) == 1
    assert attempt(library, tmp_path, interpreter=counting) is None
    assert starts(tmp_path) == 1


def test_a_refusal_is_cached_too(counting, tmp_path):
    (tmp_path / "lib.so").write_text("text")
    first = attempt(tmp_path / "lib.so", tmp_path, interpreter=counting)
    assert attempt(tmp_path / "lib.so", tmp_path, interpreter=counting).split() == first.split()
    assert starts(tmp_path) == 1


@pytest.mark.parametrize("signal", ["KILL", "TERM", "INT"])
def test_a_trial_ended_by_an_outside_signal_is_not_cached(library, tmp_path, signal):
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\n[ -e {tmp_path}/again ] && exec {sys.executable} "$@"\nkill -{signal} $$\n')
    interpreter.chmod(0o755)
    assert "was killed by signal" in attempt(library, tmp_path, interpreter=str(interpreter))
    (tmp_path / "again").write_text("")
    assert attempt(library, tmp_path, interpreter=str(interpreter)) is None


def test_a_failed_start_is_not_cached(library, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/no/such/shell\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    times = interpreter.stat()
    assert "cannot be started" in attempt(library, tmp_path, interpreter=str(interpreter))
    interpreter.write_text(f'#!/////bin/sh   \nexec {sys.executable} "$@"\n')
    os.utime(interpreter, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert attempt(library, tmp_path, interpreter=str(interpreter)) is None


def test_a_full_disk_leaves_the_old_verdicts(tmp_path):
    path = str(tmp_path / "trials")
    write_verdicts(path, {"a": None})
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30)); "
        "from cpulaunch.launch.trial import write_verdicts; write_verdicts(sys.argv[1], {'b' * 20: None})"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert read_verdicts(path) == {"a": None}
    assert os.listdir(tmp_path) == ["trials"]


@pytest.mark.parametrize("changed", ["library", "interpreter", "preload"])
def test_a_changed_file_is_tried_again(counting, tmp_path, changed, library):
    copy = tmp_path / "libcopy.so"
    copy.write_bytes(Path(library).read_bytes())
    attempt(copy, tmp_path, interpreter=counting)
    environ = {}
    if changed == "library":
        os.utime(copy, ns=(1, 1))
    elif changed == "interpreter":
        os.utime(counting, ns=(1, 1))
    else:
        environ = {"LD_PRELOAD": library}
    attempt(copy, tmp_path, interpreter=counting, environ=environ)
    assert starts(tmp_path) == 2


def test_no_candidates_leave_the_cache_untouched(tmp_path):
    cache = tmp_path / "cache"
    assert try_preloads([], interpreter="/no/python", environ={}, cache_file=str(cache / "trials")) == {}
    assert not cache.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"\xff\xfe\0", b"cpulaunch trials 2\nkey\tgood\n", b"cpulaunch trials 1\n" + b"x" * MAX_BYTES],
)
def test_a_corrupt_cache_is_ignored(tmp_path, content):
    path = tmp_path / "trials"
    path.write_bytes(content)
    path.chmod(0o600)
    assert read_verdicts(str(path)) == {}


def test_a_cache_that_others_may_write_is_ignored(tmp_path):
    path = str(tmp_path / "trials")
    write_verdicts(path, {"key": None})
    assert read_verdicts(path) == {"key": None}
    os.chmod(path, 0o666)
    assert read_verdicts(path) == {}


def test_a_cache_that_is_a_link_is_ignored(tmp_path):
    write_verdicts(str(tmp_path / "trials"), {"key": None})
    (tmp_path / "link").symlink_to("trials")
    assert read_verdicts(str(tmp_path / "link")) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_cache_of_another_user_is_ignored(tmp_path):
    path = str(tmp_path / "trials")
    write_verdicts(path, {"key": None})
    os.chown(path, 12345, 12345)
    assert read_verdicts(path) == {}


def test_a_cache_that_cannot_be_written_is_no_error(library, tmp_path):
    (tmp_path / "file").write_text("")
    assert attempt(library, tmp_path, cache_file="file/trials") is None
    assert attempt(library, tmp_path, cache_file=None) is None


def test_verdicts_survive_writing(tmp_path):
    path = str(tmp_path / "new" / "trials")
    verdicts = {"a": None, "b": "why\tnot\nat all"}
    write_verdicts(path, verdicts)
    assert read_verdicts(path) == {"a": None, "b": "why not at all"}
    assert os.listdir(tmp_path / "new") == ["trials"]


def test_the_oldest_verdicts_are_dropped(tmp_path):
    path = str(tmp_path / "trials")
    write_verdicts(path, {str(number): None for number in range(1000)})
    assert list(read_verdicts(path))[-1] == "999"
    assert len(read_verdicts(path)) < 1000


def test_the_message_of_a_time_out_names_the_limit():
    assert "did not end within" in TIMED_OUT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_trial_start_ends_with_the_launcher(library, tmp_path, number):
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o755)
    code = (
        "import sys; from cpulaunch.launch.trial import try_preloads; "
        "try_preloads([sys.argv[1]], interpreter=sys.argv[2], environ={}, cache_file=None)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, library, str(slow)], cwd=ROOT)
    pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "a trial start"))
    launcher.send_signal(number)
    launcher.wait()
    eventually(lambda: not alive(pid), "the end of the trial start")
