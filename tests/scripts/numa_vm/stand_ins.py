"""Stand-ins for the programs that scripts/numa-vm starts, which reproduce rare failures on every run.

`qemu-system-x86_64` records its start and behaves as the next word of the file `behaviours` says; the last word applies
to all later starts. `apt-get`, `apt-cache` and `dpkg` provide an empty kernel package.
"""

import os
import subprocess
import sys
from pathlib import Path

NUMA_VM = Path(__file__).parents[3] / "scripts/numa-vm"

BEGINNING = """#!{python} -IS
import fcntl, os, pathlib, re, signal, struct, sys
folder = pathlib.Path({folder!r})
def record(name):
    with open(folder / name, "a") as file:
        file.write(" ".join(sys.argv[1:]) + "\\n")
    return len((folder / name).read_text().splitlines())
"""
QEMU = """
behaviours = (folder / "behaviours").read_text().split()
behaviour = behaviours[min(record("machines"), len(behaviours)) - 1]
port = os.open(re.search(r"id=port,path=(\\S+)", " ".join(sys.argv))[1], os.O_WRONLY)
def send(kind, content=b""):
    os.write(port, struct.pack(">cI", kind, len(content)) + content)
if behaviour == "dies":
    sys.exit("assertion failed")
if behaviour == "hangs":
    signal.pause()
send(b"S")
send(b"1", b"output " * 100_000)
send(b"2", b"errors")
if behaviour == "breaks":
    sys.exit("assertion failed")
send(b"X", b"7")
if behaviour != "ends":
    signal.pause()
"""
APT_GET = """
record("apt-get")
if (folder / "stale").exists() and "update" not in sys.argv:
    sys.exit("E: 404 Not Found")
(folder / "stale").unlink(missing_ok=True)
with open(folder / "lock", "w") as lock:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        record("refused")
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
    """A folder with the stand-ins and the records of their calls, in which numa-vm can be started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir()
        for name, code in PROGRAMS.items():
            program = self.programs / name
            program.write_text(BEGINNING.format(python=os.path.realpath(sys.executable), folder=str(folder)) + code)
            program.chmod(0o755)

    def start(self, behaviours: str, *options: str) -> subprocess.Popen[str]:
        """numa-vm, started with machines that show these behaviours one after the other."""
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
        records = self.folder / program
        return records.read_text().splitlines() if records.exists() else []


def ending(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    output, errors = process.communicate()
    return process.returncode, output, errors
