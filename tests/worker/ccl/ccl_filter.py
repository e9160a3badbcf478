"""A process that may not open the files of other processes, as where the kernel forbids it."""

import os
import re
import sys

OTHERS = re.compile(r"/proc/\d+/fd/")


def forbid_reading_others():
    """Effect: this process may not open in /proc what others have open, as where they have other capabilities."""

    def refuse(event, arguments):
        if event == "open" and isinstance(arguments[0], str) and OTHERS.match(arguments[0]):
            raise PermissionError(13, os.strerror(13), arguments[0])

    sys.addaudithook(refuse)
