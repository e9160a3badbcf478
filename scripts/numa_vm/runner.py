"""Inside the guest: becomes the user, starts the command with its exact arguments, tells the host what comes of it.

Everything goes through one virtio port, in order, in frames (kind, length, content): b"S" says that the command starts,
b"1" and b"2" are its output, b"X" is its exit status. So the host has all output before it reads how the command ended.
"""

import json
import os
import select
import struct
import time
from typing import Any, NoReturn

CONTROL = "/run/control"
PIPE_BYTES = 1 << 20  # what an unprivileged process may enlarge a pipe to


def main() -> None:
    """Start, relay, tell the status."""
    with open(f"{CONTROL}/command.json") as file:
        command = json.load(file)
    for directory in command["searchable"]:
        os.chmod(directory, os.stat(directory).st_mode | 0o111)
    port = os.open(port_of_the_host(), os.O_WRONLY)
    pipes = {b"1": os.pipe(), b"2": os.pipe()}
    for _, write_end in pipes.values():
        os.fchown(write_end, command["uid"], command["gid"])
    tell(port, b"S", b"")
    child = os.fork()
    if child == 0:
        become(command, pipes[b"1"][1], pipes[b"2"][1])
    status = relay(port, child, {read_end: kind for kind, (read_end, _) in pipes.items()})
    os.sync()
    tell(port, b"X", str(status).encode())


def port_of_the_host() -> str:
    """The device of the only port; its driver adds it in its own time."""
    while True:
        for name in os.listdir("/dev"):
            if name.startswith("vport"):
                return f"/dev/{name}"
        time.sleep(0.05)


def become(command: dict[str, Any], output: int, errors: int) -> NoReturn:
    """Effect: this process is the command from here on."""
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
    """The child's exit code, 128 + N after signal N. Effect: all it wrote, whoever else holds its pipes, is told."""
    waiting, ended = select.poll(), os.pidfd_open(child)
    for source in (*sources, ended):
        os.set_blocking(source, False)
        waiting.register(source, select.POLLIN)
    running = True
    while running:
        running = ended not in [source for source, _ in waiting.poll()]
        for source, kind in sources.items():
            try:
                tell(port, kind, os.read(source, PIPE_BYTES))
            except BlockingIOError:
                continue
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def tell(port: int, kind: bytes, content: bytes) -> None:
    """Effect: one frame goes to the host; waits while the host has not taken earlier ones."""
    frame = struct.pack(">cI", kind, len(content)) + content
    while frame:
        frame = frame[os.write(port, frame) :]


if __name__ == "__main__":
    main()
