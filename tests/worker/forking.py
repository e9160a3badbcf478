"""Run by the tests: imports torch once, then each case in a forked process, as if torch had just been imported there.

A case is {"env": {…}, "before": code, "program": code}. Prints name -> {"code", "out", "err"} as JSON on stdout.
"""

import atexit
import json
import os
import sys
import tempfile
import traceback

import torch


def run_case(case):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(in_child(case))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return {"code": code, "out": out.read(), "err": err.read()}


def in_child(case):
    names = {"__name__": "__main__", "torch": torch, "os": os, "sys": sys}
    code = 0
    os.environ.update(case["env"])
    try:
        exec(case["before"], names)
        from cpulaunch.worker.autoload import activate

        activate()
        exec(case["program"], names)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - reported to the test
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    json.dump({name: run_case(case) for name, case in cases.items()}, sys.stdout)
