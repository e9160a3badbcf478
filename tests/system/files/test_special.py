"""Another descriptor of what takes output: one whose writes never wait."""

import os
import pty

import pytest

from cpulaunch.system.files.special import open_nonblocking
from tests.strangers import as_other_user, needs_root

ENDED_WELL = 0


def in_terminal(action):
    """The exit code of the action in a session of its own, whose terminal this user owns."""
    pid, reader = pty.fork()
    if pid == 0:
        code = 2
        try:
            code = ENDED_WELL if action() else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(reader)
    return code


def is_own():
    """Raises: OSError unless there is another descriptor of stdout that does not wait, though stdout does."""
    fd = open_nonblocking(1)
    if fd is None or os.get_blocking(fd) or not os.get_blocking(1) or os.tcgetpgrp(fd) != os.tcgetpgrp(1):
        raise OSError


@needs_root
def test_a_terminal_of_another_user_that_is_that_of_the_process_can_be_written_without_waiting():
    """As after `su`: else a stopped terminal with a little room holds up the end of a launch."""
    assert in_terminal(lambda: as_other_user(is_own)) == ENDED_WELL


@needs_root
@pytest.mark.parametrize("make", [pty.openpty, os.pipe], ids=["terminal", "pipe"])
def test_what_another_user_owns_and_is_no_terminal_of_the_process_is_not_opened_again(make):
    def refused():
        ends = make()
        return as_other_user(lambda: None if open_nonblocking(ends[1]) is None else os.abort())

    assert in_terminal(refused) == ENDED_WELL


def test_a_pipe_can_be_written_without_waiting_and_stays_as_it_is_for_others():
    reader, writer = os.pipe()
    own = open_nonblocking(writer)
    assert (os.get_blocking(own), os.get_blocking(writer)) == (False, True)
    for fd in (reader, writer, own):
        os.close(fd)
