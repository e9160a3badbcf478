"""A rank's program in the tests: records its environment and arguments, and prints a line to each stream.

Arguments: `fail=RANK:CODE:TIMES` ends that rank with that code in the first TIMES attempts, once all others have
written; they then wait for their end, as ranks in a collective do.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

env = dict(os.environ)
rank, world, attempt = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["TORCHELASTIC_RESTART_COUNT"])
folder = Path(env["SEEN"])
written = folder / f"{attempt}.{rank}.json"
Path(f"{written}.new").write_text(json.dumps({"env": env, "argv": sys.argv, "name": __name__, "cwd": os.getcwd()}))
# One write each: under torchrun, ranks write to the terminal themselves, and a print is two writes that others split.
os.write(1, f"out of {rank}, attempt {attempt}\n".encode())
os.write(2, f"err of {rank}, attempt {attempt}\n".encode())
os.rename(f"{written}.new", written)

for argument in sys.argv[1:]:
    if argument.startswith("fail="):
        who, code, times = map(int, argument.removeprefix("fail=").split(":"))
        if attempt < times and rank != who:
            signal.pause()
        while attempt < times and not all((folder / f"{attempt}.{each}.json").exists() for each in range(world)):
            time.sleep(0.01)
        if attempt < times:
            sys.exit(code)
