"""The controlling terminal of this process."""

from __future__ import annotations

import fcntl
import os
import termios

TERMINAL = "/dev/tty"


def leave_terminal() -> None:
    """Effect: this process and those that it starts from now on have no terminal to ask for input.

    One that reads a terminal in the background is stopped instead. Signals of the terminal reach its foreground group
    as before. A leader of a session keeps it: its whole session would lose it, and get SIGHUP.
    Source: ioctl_tty(2), TIOCNOTTY.
    """
    if os.getsid(0) == os.getpid():
        return
    try:
        terminal = os.open(TERMINAL, os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
    except OSError:
        return
    finally:
        os.close(terminal)
