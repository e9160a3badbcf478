"""scripts/numa-vm passes on the arguments of a command, its output and its exit code, and runs it as any user."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NUMA_VM = Path(__file__).parents[3] / "scripts/numa-vm"
ARGUMENTS = ["two words", 'it\'s "quoted"', "$HOME * `id`", "", "new\nline", "--help"]
OTHER_USER = 65534
GONE = Path("/tmp/written-in-the-guest")
PROGRAM = f"""
import os, sys
print(os.getuid(), repr(sys.argv[2:]))
print("to standard error", file=sys.stderr)
open(os.path.join(sys.argv[1], "kept"), "w").write("from the guest")
open("{GONE}", "w").write("in the guest's memory only")
sys.exit(7)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs x86_64 Linux"),
    pytest.mark.skipif(
        os.name == "posix" and os.geteuid() != 0 and shutil.which("qemu-system-x86_64") is None,
        reason="qemu-system-x86_64 is not installed and only root can install it",
    ),
]


def numa_vm(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, in one tuple so that a failed assertion shows all of them."""
    done = subprocess.run([sys.executable, NUMA_VM, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_arguments_user_output_files_and_exit_code_pass_through(tmp_path: Path) -> None:
    writable = tmp_path / "kept, it's here"
    writable.mkdir()
    writable.chmod(0o777)
    options = ("--user", OTHER_USER, "--writable", writable)
    seen = numa_vm(*options, sys.executable, "-c", PROGRAM, writable, *ARGUMENTS)
    assert seen == (7, f"{OTHER_USER} {ARGUMENTS!r}\n", "to standard error\n")
    assert (writable / "kept").read_text() == "from the guest"
    assert not GONE.exists()


def test_time_limit_ends_the_machine() -> None:
    code, output, errors = numa_vm("--timeout", "2", sys.executable, "-c", "import time; time.sleep(3600)")
    assert (code, output, errors.partition(" s")[0]) == (124, "", "numa-vm: not finished after 2"), errors


def test_unknown_program_starts_no_machine() -> None:
    assert numa_vm("no-such-program") == (125, "", "numa-vm: no such program: no-such-program\n")
