"""Sleep for the given seconds: whatever is used meanwhile, the launcher uses."""

import sys
import time

time.sleep(float(sys.argv[1]))
