"""Run by the tests: a worker with a child, a daemon that ignores SIGTERM, and a file such as libfabric's."""

import os
import signal
import time

with open(f"/dev/shm/{os.getpid()}:{os.getuid()}:{os.environ['CPULAUNCH_TEST_RUN']}", "w"):
    pass
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(0.4)
os.unlink(f"/dev/shm/{os.getpid()}:{os.getuid()}:{os.environ['CPULAUNCH_TEST_RUN']}")
