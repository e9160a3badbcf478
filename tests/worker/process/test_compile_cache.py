"""Where torch.compile keeps the code that it loads: in a folder that no other user can change."""

import fcntl
import getpass
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


@pytest.mark.parametrize(("settings", "below"), [(INDUCTOR, "."), (ONEDNN, "."), (OLD, "threads-4")])
def test_torchs_own_folder_is_used_and_made_private(temporary, settings, below):
    folder = temporary / "torchinductor_me"
    assert chosen(settings) == folder / below
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / below / "compiled").touch()
    assert chosen(settings) == folder / below  # What is compiled is found again.


def test_a_folder_that_the_user_named_is_left_alone(temporary, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert chosen() == Path("/mine")
    assert not list(temporary.iterdir())


def test_the_name_that_torch_gave_what_it_started_is_no_choice_of_the_user(temporary, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(temporary / "torchinductor_me"))
    (temporary / "torchinductor_me").mkdir()
    (temporary / "torchinductor_me").chmod(0o777)
    assert chosen() == own_cache(temporary)


@needs_root
@pytest.mark.parametrize(("settings", "below"), [(INDUCTOR, "."), (OLD, "threads-4")])
def test_a_folder_that_another_user_made_is_not_used(temporary, settings, below):
    folder = temporary / "torchinductor_me"
    as_stranger(folder.mkdir)
    assert chosen(settings) == own_cache(temporary) / below
    assert own_cache(temporary).stat().st_mode & 0o777 == 0o700
    assert not list(folder.iterdir())


@needs_root
def test_a_link_that_another_user_made_is_not_followed(temporary):
    target = temporary.parent / "home/target"
    target.mkdir()
    as_stranger(lambda: (temporary / "torchinductor_me").symlink_to(target))
    assert chosen(OLD) == own_cache(temporary) / "threads-4"
    assert not list(target.iterdir())


@pytest.mark.parametrize("name", ["torchinductor_me", "."])
def test_a_folder_that_others_can_write_is_not_used(temporary, name):
    (temporary / "torchinductor_me").mkdir()
    (temporary / name).chmod(0o777)
    assert chosen() == own_cache(temporary)


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


@pytest.mark.parametrize("known", [True, False])
def test_headers_are_in_the_cache_that_all_numbers_of_threads_share(temporary, monkeypatch, known):
    """But not beside a folder that the user named."""
    whole = temporary / ("torchinductor_me" if known else "mine")
    codecache = SimpleNamespace(_HEADER_DIR="/tmp/headers")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(whole / "threads-4"))
    compile_cache.keep_headers(codecache, OLD)
    expected = whole if known else whole / "threads-4"
    assert Path(codecache._HEADER_DIR) == expected / "precompiled_headers"


def make_locks(folder):
    """Each file that torch locks in a cache that it has made, as all can enter it."""
    folders = [folder / below / "locks" for below in (".", "precompiled_headers", "threads-4")]
    for each in folders:
        each.mkdir(parents=True)
        (each / "a.lock").touch()
    folder.chmod(0o755)
    return [each / "a.lock" for each in folders]


@pytest.mark.parametrize("mode", [0o755, 0o711, 0o750])
@pytest.mark.parametrize(("settings", "below"), [(INDUCTOR, "."), (OLD, "threads-4")])
def test_a_cache_as_torch_makes_it_is_closed_to_others_and_kept(temporary, mode, settings, below):
    """What others may have opened in it is locked no longer."""
    folder = temporary / "torchinductor_me"
    locks = make_locks(folder)
    (folder / "compiled").touch()
    folder.chmod(mode)
    assert chosen(settings) == folder / below
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "compiled").exists()
    assert [each.exists() for each in locks] == [False, False, below == "."]


@needs_root
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_cache_in_which_a_file_is_locked_is_the_last_choice(temporary, monkeypatch, which):
    folder = temporary / "torchinductor_me"
    locks = make_locks(folder)
    with locks[which].open() as file:
        as_stranger(lambda: fcntl.flock(file, fcntl.LOCK_EX))  # The descriptor holds it on.
        assert chosen(OLD) == own_cache(temporary) / "threads-4"
        assert chosen(OLD) == own_cache(temporary) / "threads-4"
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
        assert chosen(OLD) == folder / "threads-4"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert chosen(OLD) == folder / "threads-4"


def test_without_a_private_folder_the_reason_is_told(temporary, monkeypatch):
    temporary.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary))
    with pytest.raises(RuntimeError, match=r"/tmp may be written by everyone.*; .*/inductor-.*: .*/tmp may"):
        compile_cache.install(INDUCTOR)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_the_reason_of_each_attempt_is_told(temporary, monkeypatch):
    (temporary / "torchinductor_me").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(RuntimeError) as caught:
        compile_cache.install(INDUCTOR)
    assert "torchinductor_me: Not a directory" in str(caught.value)
    assert "/proc/none" in str(caught.value)
    assert "other users" not in str(caught.value)


def test_without_a_folder_for_temporary_files_the_own_cache_is_used(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    assert chosen(OLD) == own_cache(temporary) / "threads-4"


@needs_root
@pytest.mark.parametrize("folder", ["tmp/torchinductor_me", "home"])
def test_folders_that_the_users_own_group_can_write_are_used(temporary, folder):
    """As umask 002 makes them, where each user has a group: torch's folder, and a home."""
    path = temporary.parent / folder
    path.mkdir(exist_ok=True)
    if folder == "home":
        (temporary / "torchinductor_me").mkdir(mode=0o700)  # Root's.
    os.chown(path, UID, UID)
    path.chmod(0o775)
    expected = own_cache(temporary) if folder == "home" else path
    getpass.getuser()

    def choose():
        if chosen() != expected:
            raise OSError

    as_stranger(choose)


def test_a_folder_in_which_others_can_make_files_is_not_used(temporary):
    (temporary / "torchinductor_me").mkdir()
    (temporary / "torchinductor_me").chmod(0o1777)
    assert chosen() == own_cache(temporary)


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
