"""Errors where a launch cannot open what its workers read and write."""

import errno
import os

import pytest

from cpulaunch.launch.process.descriptors import MORE_DESCRIPTORS, stdio_error
from cpulaunch.launch.ranks.files import log_error
from cpulaunch.records.errors import LEAVE_FOLDERS


def failed(number, path=None):
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_lack_of_descriptors_has_a_hint_wherever_it_is_seen(number):
    assert stdio_error(failed(number), of="workers", count=2).hint == MORE_DESCRIPTORS
    assert log_error("/runs/attempt_0", failed(number), hint=LEAVE_FOLDERS).hint == MORE_DESCRIPTORS


def test_a_missing_null_device_is_no_lack_of_descriptors():
    error = stdio_error(failed(errno.ENOENT, "/dev/null"), of="workers", count=2)
    assert str(error) == "cannot open files for the workers: /dev/null (No such file or directory)"
