"""Inside the guest: switches to the user, runs the command with its exact arguments, and reports to the host.

The report goes through one virtio port as frames (kind, length, content): b"S" before the command starts, b"1" and b"2"
for its output and errors, b"X" for its exit status. The frames are in order, so the status arrives after all output.
"""

import json
import os
import select
import struct
import time
from typing import Any, NoReturn

CONTROL = "/run/control"
PIPE_BYTES = 1 << 20  # The largest size that an unprivileged process may give a pipe.


def main() -> None:
    """Effect: runs the command and sends its start, output and exit status to the host."""
    with open(f"{CONTROL}/command.json") as file:
        command = json.load(file)
    for directory in command["searchable"]:
        os.chmod(directory, os.stat(directory).st_mode | 0o111)
    port = os.open(find_host_port(), os.O_WRONLY)
    pipes = {b"1": os.pipe(), b"2": os.pipe()}
    for _, write_end in pipes.values():
        os.fchown(write_end, command["uid"], command["gid"])
    send_frame(port, b"S", b"")
    child = os.fork()
    if child == 0:
        run_as_user(command, pipes[b"1"][1], pipes[b"2"][1])
    status = relay(port, child, {read_end: kind for kind, (read_end, _) in pipes.items()})
    os.sync()
    send_frame(port, b"X", str(status).encode())


def find_host_port() -> str:
    """The device file of the only virtio port. Effect: waits until the driver has created it."""
    while True:
        for name in os.listdir("/dev"):
            if name.startswith("vport"):
                return f"/dev/{name}"
        time.sleep(0.05)


def run_as_user(command: dict[str, Any], output: int, errors: int) -> NoReturn:
    """Effect: replaces this process with the command."""
    try:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.setgroups(command["groups"])
        os.setgid(command["gid"])
        os.setuid(command["uid"])
        os.chdir(command["cwd"])
        os.execve(command["program"], command["argv"], command["env"])
    except OSError as error:
        os.write(2, f"numa-vm: {error}\n".encode())
    os._exit(126)


def relay(port: int, child: int, sources: dict[int, bytes]) -> int:
    """The child's exit code; 128 + N after signal N.

    Effect: sends everything the child wrote, even if another process still holds its pipes open.
    """
    waiting, ended = select.poll(), os.pidfd_open(child)
    for source in (*sources, ended):
        os.set_blocking(source, False)
        waiting.register(source, select.POLLIN)
    running = True
    while running:
        running = ended not in [source for source, _ in waiting.poll()]
        for source, kind in sources.items():
            try:
                send_frame(port, kind, os.read(source, PIPE_BYTES))
            except BlockingIOError:
                continue
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def send_frame(port: int, kind: bytes, content: bytes) -> None:
    """Effect: sends one frame to the host; blocks until the host has read earlier frames."""
    frame = struct.pack(">cI", kind, len(content)) + content
    while frame:
        frame = frame[os.write(port, frame) :]


if __name__ == "__main__":
    main()
