"""A rank for tests that fails in its first attempt, where it is the last of four; without torch, to be quick."""

import json
import os
import signal
import sys
import time
from pathlib import Path

failed = Path("failed")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
names = ("RANK", "LOCAL_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
print(json.dumps({name: os.environ[name] for name in names}), flush=True)
print(f"to stderr, attempt {attempt}", file=sys.stderr, flush=True)
Path(f"started-{attempt}-{os.environ['RANK']}").touch()
if attempt == 0 or sys.argv[1:] == ["always"]:
    if os.environ["RANK"] == "3":
        while len(list(Path().glob(f"started-{attempt}-*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)  # One that has only been started would be ended before it has printed anything.
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(
            json.dumps(
                {
                    "message": {
                        "message": "bad luck",
                        "extraInfo": {"py_callstack": "Traceback: bad luck", "timestamp": str(int(time.time()))},
                    }
                }
            )
        )
        failed.touch()
        sys.exit(7)
    while not failed.exists():
        time.sleep(0.01)
    if os.environ["RANK"] == "2":
        signal.pause()  # The failed rank's host ends it.
    sys.exit(8)  # The other host's ranks notice by themselves, as gloo's would.
