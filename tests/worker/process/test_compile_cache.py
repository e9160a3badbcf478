"""Where torch.compile keeps the code that it loads: in a folder that no other user can change."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from strangers import UID, as_stranger, needs_root

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.process import compile_cache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS trusts links on the way to a folder")
INDUCTOR, ONEDNN = TorchSettings(graph="inductor"), TorchSettings(graph="onednn")
OLD = TorchSettings(compile_cache="threads-4")


@pytest.fixture
def temporary(monkeypatch):
    """A folder as /tmp is, for temporary files, with a home beside it; the user is called "me"."""
    folder = Path(tempfile.mkdtemp(prefix="compile-cache-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    (folder / "home").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("LOGNAME", "me")
    yield folder / "tmp"
    shutil.rmtree(folder)


def chosen(settings=INDUCTOR):
    """The folder that torch.compile will use, removed from the environment again."""
    compile_cache.install(settings)
    return Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))


def own_cache(temporary):
    return temporary.parent / "home/.cache/cpulaunch" / f"inductor-{os.uname().nodename}"


def temporary_cache(temporary, user=None):
    return temporary / f"cpulaunch-inductor-{os.geteuid() if user is None else user}"


def made_by_torch(folder, mode=0o755):
    """A folder, as torch makes it where any of several umasks holds, and in it what others can change."""
    (folder / "precompiled_headers/locks").mkdir(parents=True)
    (folder / "precompiled_headers").chmod(0o777)
    folder.chmod(mode)
    return folder


@pytest.mark.parametrize(("settings", "below"), [(INDUCTOR, "."), (ONEDNN, "."), (OLD, "threads-4")])
def test_compiled_code_is_in_a_private_cache_of_cpulaunch(temporary, settings, below):
    assert chosen(settings) == own_cache(temporary) / below
    assert own_cache(temporary).stat().st_mode & 0o777 == 0o700
    assert not list(temporary.iterdir())
    (own_cache(temporary) / below / "compiled").touch()
    assert chosen(settings) == own_cache(temporary) / below  # What is compiled is found again.
    assert (own_cache(temporary) / below / "compiled").exists()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o777])
@pytest.mark.parametrize(("settings", "below"), [(INDUCTOR, "."), (OLD, "threads-4")])
def test_torchs_own_folder_is_neither_used_nor_changed(temporary, mode, settings, below):
    """Others may have changed what is below it, or be in it, whatever its mode is now."""
    folder = made_by_torch(temporary / "torchinductor_me", mode)
    assert chosen(settings) == own_cache(temporary) / below
    assert folder.stat().st_mode & 0o777 == mode
    assert (folder / "precompiled_headers/locks").exists()


def test_a_folder_that_the_user_named_is_left_alone(temporary, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert chosen() == Path("/mine")
    assert not list(temporary.iterdir())


def test_the_name_that_torch_gave_what_it_started_is_no_choice_of_the_user(temporary, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(temporary / "torchinductor_me"))
    assert chosen() == own_cache(temporary)


@pytest.mark.parametrize("below", [".", "threads-4"])
@pytest.mark.parametrize("changed", ["folder", "link"])
def test_an_inherited_cache_is_checked_again(temporary, monkeypatch, below, changed):
    """Another user may have made it since, in the place of one that was removed for its age."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    settings = TorchSettings(graph="inductor", compile_cache="" if below == "." else below)
    inherited, place = str(chosen(settings)), temporary_cache(temporary)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", inherited)
    assert str(chosen(settings)) == inherited
    shutil.rmtree(place)
    made = temporary / "made" if changed == "link" else place
    (made / below).mkdir(parents=True, exist_ok=True)
    made.chmod(0o777)
    if changed == "link":
        place.symlink_to("made")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", inherited)
    with pytest.raises(RuntimeError, match="may be written by everyone"):
        compile_cache.install(settings)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("settings", [INDUCTOR, OLD])
def test_what_removes_old_files_finds_the_cache_locked(temporary, monkeypatch, settings):
    """As systemd-tmpfiles, which takes an exclusive lock on what it removes: tmpfiles.d(5)."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    chosen(settings)
    folder = os.open(temporary_cache(temporary), os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_another_user_puts_in_the_place_of_the_cache_is_not_opened(temporary, kind):
    """Between the check of the folder and its lock: the open of a pipe would wait for a writer."""
    place = temporary / "place"
    if kind == "pipe":
        os.mkfifo(place)
        writer = os.open(place, os.O_RDWR | os.O_NONBLOCK)
    else:
        place.symlink_to(temporary)
        writer = None
    held = len(compile_cache._held)
    compile_cache._hold(str(place))
    assert len(compile_cache._held) == held
    if writer is not None:
        os.close(writer)


@pytest.mark.parametrize(("mode", "used"), [(0o711, False), (0o750, False), (0o700, True)])
@pytest.mark.parametrize(("settings", "below"), [(INDUCTOR, "."), (OLD, "threads-4")])
def test_a_cache_that_others_can_enter_is_not_used(temporary, mode, used, settings, below):
    """They may have changed or locked what is in it, even where it is not theirs to change any more."""
    made_by_torch(own_cache(temporary), mode)
    assert chosen(settings) == (own_cache(temporary) if used else temporary_cache(temporary)) / below
    assert temporary_cache(temporary).exists() != used
    assert own_cache(temporary).stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("cause", ["everyone can write it", "read-only", "a file", "no home"])
@pytest.mark.parametrize(("settings", "below"), [(INDUCTOR, "."), (OLD, "threads-4")])
def test_without_a_cache_a_private_folder_for_temporary_files_is_used(temporary, monkeypatch, cause, settings, below):
    if cause == "everyone can write it":
        (temporary.parent / "home").chmod(0o777)
    elif cause == "read-only":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    elif cause == "a file":
        (temporary.parent / "home/.cache").touch()
    else:
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert chosen(settings) == temporary_cache(temporary) / below
    assert temporary_cache(temporary).stat().st_mode & 0o777 == 0o700
    (temporary_cache(temporary) / "compiled").touch()
    assert chosen(settings) == temporary_cache(temporary) / below
    assert (temporary_cache(temporary) / "compiled").exists()


@pytest.mark.parametrize(("unloadable", "used"), [("home", temporary_cache), (".", own_cache)])
def test_a_cache_from_which_no_library_can_be_loaded_is_the_last_choice(temporary, monkeypatch, unloadable, used):
    """And none where all that is made there are libraries."""
    plain, home = os.statvfs, str(temporary.parent / unloadable)

    def statvfs(path):
        found = plain(path)
        return SimpleNamespace(f_flag=found.f_flag | os.ST_NOEXEC) if str(path).startswith(home) else found

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert chosen(ONEDNN) == used(temporary)
    if unloadable == "home":
        assert chosen(INDUCTOR) == used(temporary)
    else:
        with pytest.raises(RuntimeError, match=r"mounted with noexec.*; set TORCHINDUCTOR_CACHE_DIR"):
            compile_cache.install(INDUCTOR)


@needs_root
@pytest.mark.parametrize("taken", ["folder", "link"])
def test_what_another_user_made_is_not_used(temporary, monkeypatch, taken):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    target, path = temporary.parent / "home/target", temporary_cache(temporary)
    target.mkdir(mode=0o700)
    as_stranger(path.mkdir if taken == "folder" else lambda: path.symlink_to(target))
    with pytest.raises(RuntimeError, match=rf"{path}.*--graph does nothing"):
        compile_cache.install(INDUCTOR)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert not list(target.iterdir())


COMPILER = """
import os
import torch._inductor.codecache as codecache
from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.graph.compiled import Compiler
from cpulaunch.worker.graph.precision import Precision
settings = TorchSettings(graph="inductor")
if hasattr(codecache.config, "cpp_cache_precompile_headers"):
    Compiler(settings, Precision(None))
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] + "/precompiled_headers"
    assert (codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR) == (folder, folder + "/locks")
    del codecache._HEADER_DIR
    Compiler(settings, Precision(None))
    assert not codecache.config.cpp_cache_precompile_headers
"""


PROBER = """
import subprocess, sys
from torch._inductor.cpu_vec_isa import VecISA
from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.graph.compiled import Compiler
from cpulaunch.worker.graph.precision import Precision
for _ in range(2):
    Compiler(TorchSettings(graph="inductor"), Precision(None))
code = VecISA._avx_py_load
subprocess.run([sys.executable, "-c", code.replace("__lib_path__", "libc.so.6")], check=True)
assert code.count("import sys\\nsys.path[:]") == 1
"""


@pytest.mark.torch
def test_torch_tries_instructions_without_modules_of_the_current_folder(tmp_path):
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    current, script = tmp_path / "current", tmp_path / "prober.py"
    current.mkdir()
    for name in ("ctypes", "torch"):
        (current / f"{name}.py").write_text("raise SystemExit('imported from the current folder')\n")
    script.write_text(PROBER)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
    subprocess.run([sys.executable, script], check=True, cwd=current, env=os.environ | {"PYTHONPATH": path})


@pytest.mark.torch
def test_the_installed_torch_compiles_from_headers_where_the_other_code_is(tmp_path):
    """And from none that are compiled, if it named their folder in another way."""
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILER], check=True, env=environ)


def test_headers_stay_where_they_are_without_a_folder_for_compiled_code(temporary):
    codecache = SimpleNamespace(_HEADER_DIR="/tmp/headers")
    compile_cache.keep_headers(codecache, OLD)
    assert codecache._HEADER_DIR == "/tmp/headers"


@pytest.mark.parametrize("find", [own_cache, temporary_cache, None])
def test_headers_are_in_the_cache_that_all_numbers_of_threads_share(temporary, monkeypatch, find):
    """But not beside a folder that the user named."""
    whole = temporary / "mine" if find is None else find(temporary)
    codecache = SimpleNamespace(_HEADER_DIR="/tmp/headers")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(whole / "threads-4"))
    compile_cache.keep_headers(codecache, OLD)
    expected = whole if find else whole / "threads-4"
    assert Path(codecache._HEADER_DIR) == expected / "precompiled_headers"


def test_without_a_private_folder_the_reason_is_told(temporary, monkeypatch):
    temporary.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary))
    with pytest.raises(RuntimeError, match=r"/inductor-.*: .*/tmp may be written by everyone.*; .*/tmp may"):
        compile_cache.install(INDUCTOR)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_the_reason_of_each_attempt_is_told(temporary, monkeypatch):
    temporary_cache(temporary).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(RuntimeError) as caught:
        compile_cache.install(INDUCTOR)
    assert f"cpulaunch-inductor-{os.geteuid()}: Not a directory" in str(caught.value)
    assert "/proc/none" in str(caught.value)
    assert "other users" not in str(caught.value)


def without_temporary_files(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])


def test_the_cache_needs_no_folder_for_temporary_files(temporary, monkeypatch):
    without_temporary_files(monkeypatch)
    assert chosen(OLD) == own_cache(temporary) / "threads-4"


def test_without_any_folder_the_reason_is_told(temporary, monkeypatch):
    without_temporary_files(monkeypatch)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(RuntimeError, match=r"\(this user has no home folder\)"):
        compile_cache.install(INDUCTOR)


@needs_root
@pytest.mark.parametrize("has_home", [True, False])
def test_folders_that_the_users_own_group_can_write_are_used(temporary, monkeypatch, has_home):
    """As umask 002 makes them, where each user has a group; a folder for temporary files without a home."""
    path = temporary.parent / "home"
    if has_home:
        os.chown(path, UID, UID)
    path.chmod(0o775)
    expected = own_cache(temporary) if has_home else temporary_cache(temporary, UID)

    def choose():
        os.umask(0o002)
        if chosen() != expected or expected.stat().st_mode & 0o777 != 0o700:
            raise OSError

    as_stranger(choose)


@pytest.mark.parametrize(("settings", "ends"), [(OLD, False), (INDUCTOR, True)])
def test_only_a_program_whose_graphs_are_compiled_needs_the_folder(temporary, monkeypatch, settings, ends):
    """Before torch 2.13, every launch has a folder for what the program itself may compile."""
    temporary.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    from cpulaunch.records.record import replace
    from cpulaunch.worker import apply

    setting = next(each for each in apply.PLUGIN_SETTINGS if each.name == "compile_cache")
    pid = os.fork()
    if pid == 0:
        try:
            apply._apply(setting, replace(settings, strict=True))
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (125 if ends else 0)


def test_without_a_private_folder_nothing_is_compiled(monkeypatch):
    from cpulaunch.worker import apply

    monkeypatch.setattr(apply, "_failed", {"compile_cache"})
    assert apply._usable(INDUCTOR).graph == "off"
    assert apply._usable(ONEDNN).graph == "off"


CAPTURED = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).eval()
with torch.no_grad():
    for _ in range(4):
        model(torch.ones(8, 64))
"""


def leave_a_search(folder, marker):
    """Effect: does what anyone can: leaves what torch.compile reads as the state of a search for its own defects."""
    os.umask(0)
    for backend in ("inductor", "eager", "aot_eager"):
        (folder / "bisect" / backend).mkdir(parents=True)
        (folder / "bisect" / backend / "planted_config.txt").write_text(f"config_name=open({str(marker)!r}, 'w')\n")
    (folder / "bisect/bisect_status.txt").write_text("backend=inductor\nsubsystem=planted\n")


@needs_root
@pytest.mark.torch
@pytest.mark.parametrize("level", ["--graph=onednn", "-O3"])
def test_what_a_stranger_left_for_torch_compile_is_not_evaluated(temporary, level):
    pytest.importorskip("torch")
    marker, program = temporary.parent / "home/marker", temporary.parent / "home/infer.py"
    as_stranger(lambda: leave_a_search(temporary / "torchinductor_me", marker))
    program.write_text(CAPTURED)
    launched = subprocess.run(
        [sys.executable, "-m", "cpulaunch", level, program],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary), "USER": "me"},
        timeout=300,
    )
    assert launched.returncode == 0, launched.stderr
    assert not marker.exists()
