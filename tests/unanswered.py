"""A file system that never answers, as a worker of root may mount one: `python unanswered.py POINT CODE`.

What CODE, which runs beside it, writes to stdout is shown, or that it hangs.
"""

import ctypes
import os
import stat
import subprocess
import sys

SECONDS, NO_FUSE = 60, 77


def beside_unanswered(point, code):
    """What Python code writes to stdout while what is mounted at a path never answers; None where that is not allowed.

    The mount is in a namespace of its own.
    """
    command = ["unshare", "--mount", sys.executable, __file__, str(point), code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * SECONDS, check=False)
    assert done.returncode in (0, NO_FUSE), done.stderr
    return None if done.returncode == NO_FUSE else done.stdout


def main(point, code):
    """Effect: mounts, runs the code, and kills it after a time limit."""
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        sys.exit(NO_FUSE)
    options = f"fd={fd},rootmode={stat.S_IFMT(os.stat(point).st_mode):o},user_id=0,group_id=0"
    if ctypes.CDLL(None).mount(b"unanswered", os.fsencode(point), b"fuse", 0, options.encode()):
        sys.exit(NO_FUSE)
    try:
        subprocess.run([sys.executable, "-c", code], timeout=SECONDS, check=True)
    except subprocess.TimeoutExpired:
        print("it hangs")


if __name__ == "__main__":
    main(*sys.argv[1:])
