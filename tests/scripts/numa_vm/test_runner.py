"""The frames that the runner inside the machine sends, written to a file instead of a virtio port."""

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.numa_vm.runner import relay

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def relayed(script: str, port: Path) -> tuple[int, bytes, bytes]:
    """Exit status, standard output and standard error of a shell script, taken from the frames.

    The shell function `orphan` keeps both pipes open until this function returns.
    """
    (output, output_end), (errors, errors_end), (end, ending) = os.pipe(), os.pipe(), os.pipe()
    command = ["/bin/sh", "-c", f"exec 3<&0; orphan() {{ read line <&3; }}; {script}"]
    pipes = {"stdin": end, "stdout": output_end, "stderr": errors_end}
    with subprocess.Popen(command, **pipes) as child, port.open("wb") as file:
        try:
            status = relay(file.fileno(), child.pid, {output: b"1", errors: b"2"})
        finally:
            for descriptor in (output, output_end, errors, errors_end, end, ending):
                os.close(descriptor)
    frames = list(frames_of(port.read_bytes()))
    return status, *(b"".join(content for kind, content in frames if kind == expected) for expected in (b"1", b"2"))


def frames_of(content: bytes):
    """(kind, content) of every frame."""
    while content:
        kind, length = struct.unpack(">cI", content[:5])
        yield kind, content[5 : 5 + length]
        content = content[5 + length :]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 3", (3, b"", b"")),
        ("echo to; echo error >&2; orphan & kill -TERM $$", (128 + signal.SIGTERM, b"to\n", b"error\n")),
        ("exec >&- 2>&-; exit 4", (4, b"", b"")),
        ("head -c 3000000 /dev/zero; echo end >&2; orphan & exit 5", (5, b"\0" * 3_000_000, b"end\n")),
    ],
)
def test_all_output_is_sent_even_if_another_process_outlives_the_command(script, expected, tmp_path: Path) -> None:
    assert relayed(script, tmp_path / "port") == expected
