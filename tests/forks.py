"""A server that imports modules once and forks programs of the tests: `forks.py DESCRIPTOR MODULE…`.

Every program is a process with standard streams, environment and folder of its own, and ends as a Python program does.
A request, from the socket DESCRIPTOR, has the program's arguments, environment and folder as JSON, and descriptors: of
stdout, stderr and a socket, which gets the program's process id and later its exit code. The server ends with the
tests.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
from pathlib import Path

REQUEST_BYTES = 1 << 17
NUMBER = struct.Struct("i")


def next_program(connection):
    """A program's arguments, in the process of that program. Ends the server when the tests end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # No one waits for the parents of programs.
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not request:
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out, err, answers = descriptors
    program = os.fork()
    if program:
        os.write(answers, NUMBER.pack(program))
        os.write(answers, NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])))
        os._exit(0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in (*descriptors, connection.detach()):
        os.close(descriptor)
    arguments, environ, folder = json.loads(request)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    return arguments


def run(arguments):
    """Effect: as `python ARGUMENTS`: a file, or -m and a module."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # Else each program would look at all objects of the modules when it ends, and so copy their memory.
    run(next_program(socket.socket(fileno=int(sys.argv[1]))))
