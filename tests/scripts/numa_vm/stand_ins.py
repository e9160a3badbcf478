"""Stand-ins for the programs that scripts/numa-vm starts: what goes wrong in them one time in a hundred goes wrong here
every time.

`qemu-system-x86_64` does what the next word of the file `behaviours` says (the last one for good) and notes that it was
started; `apt-get`, `apt-cache` and `dpkg` hand out a kernel package that holds nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

NUMA_VM = Path(__file__).parents[3] / "scripts/numa-vm"

BEGINNING = """#!{python} -IS
import fcntl, os, pathlib, re, signal, struct, sys
folder = pathlib.Path({folder!r})
def note(name):
    with open(folder / name, "a") as file:
        file.write(" ".join(sys.argv[1:]) + "\\n")
    return len((folder / name).read_text().splitlines())
"""
QEMU = """
behaviours = (folder / "behaviours").read_text().split()
behaviour = behaviours[min(note("machines"), len(behaviours)) - 1]
port = os.open(re.search(r"id=port,path=(\\S+)", " ".join(sys.argv))[1], os.O_WRONLY)
def tell(kind, content=b""):
    os.write(port, struct.pack(">cI", kind, len(content)) + content)
if behaviour == "dies":
    sys.exit("assertion failed")
if behaviour == "hangs":
    signal.pause()
tell(b"S")
tell(b"1", b"output " * 100_000)
tell(b"2", b"errors")
if behaviour == "breaks":
    sys.exit("assertion failed")
tell(b"X", b"7")
if behaviour != "ends":
    signal.pause()
"""
APT_GET = """
note("apt-get")
if (folder / "stale").exists() and "update" not in sys.argv:
    sys.exit("E: 404 Not Found")
(folder / "stale").unlink(missing_ok=True)
with open(folder / "lock", "w") as lock:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        note("refused")
        sys.exit(f"E: Could not get lock {folder}/lock. It is held by process 1 (apt-get)")
    if "download" in sys.argv:
        open("linux.deb", "x").close()
"""
APT_CACHE = "print('  Depends: linux-image-6.1.0-1-amd64')"
DPKG = """
boot = pathlib.Path(sys.argv[-1]) / "boot"
boot.mkdir(parents=True)
(boot / "vmlinuz-6.1.0-1-amd64").touch()
"""
PROGRAMS = {"qemu-system-x86_64": QEMU, "busybox": "", "apt-get": APT_GET, "apt-cache": APT_CACHE, "dpkg": DPKG}
OUTPUT, ERRORS, EXIT_CODE = "output " * 100_000, "errors", 7


class StandIns:
    """numa-vm among them, in a folder that also tells what they were called for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir()
        for name, code in PROGRAMS.items():
            program = self.programs / name
            program.write_text(BEGINNING.format(python=os.path.realpath(sys.executable), folder=str(folder)) + code)
            program.chmod(0o755)

    def start(self, behaviours: str, *options: str) -> subprocess.Popen[str]:
        """numa-vm, while its machines behave like this one after the other."""
        (self.folder / "behaviours").write_text(behaviours)
        return subprocess.Popen(
            [sys.executable, NUMA_VM, *options, sys.executable],
            env={"PATH": str(self.programs), "XDG_CACHE_HOME": str(self.folder / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def calls(self, program: str) -> list[str]:
        """The arguments of each call so far."""
        notes = self.folder / program
        return notes.read_text().splitlines() if notes.exists() else []


def ending(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    output, errors = process.communicate()
    return process.returncode, output, errors
