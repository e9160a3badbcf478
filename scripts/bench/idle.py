"""Sleep for the given seconds: all processor time used meanwhile is the launcher's."""

import sys
import time

time.sleep(float(sys.argv[1]))
