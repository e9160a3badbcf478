"""A rank for tests that fails in its first attempt, where it is the last of four; without torch, to be quick."""

import json
import os
import sys
import time
from pathlib import Path

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
names = ("RANK", "LOCAL_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
print(json.dumps({name: os.environ[name] for name in names}), flush=True)
print(f"to stderr, attempt {attempt}", file=sys.stderr, flush=True)
if attempt == 0 or sys.argv[1:] == ["always"]:
    if os.environ["RANK"] == "3":
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
        sys.exit(7)
    time.sleep(3)
    sys.exit(8)  # The other ranks notice by themselves, as gloo's would.
