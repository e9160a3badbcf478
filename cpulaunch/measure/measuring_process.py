"""The process that measures: below guards as a launch's supervisor, with a private folder."""

from __future__ import annotations

import select
from contextlib import contextmanager

from cpulaunch.launch.process.descriptors import fd_shortage_error
from cpulaunch.launch.process.guard import fork_supervisor
from cpulaunch.launch.process.run_directory import choose_private_path, make_private_path, remove_run_directory
from cpulaunch.measure.child_process import ChildSetup
from cpulaunch.measure.execution import LaunchSetup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cpulaunch.launch.process.bind import Notify

GRACE_SECONDS = 30.0
"""How long a measurement may take to end after a signal: longer than a launch."""


@contextmanager
def measuring_process(notify: Notify, environ: Mapping[str, str]) -> Iterator[LaunchSetup]:
    """What launches share in this context, whose folder does not exist afterwards.

    Effect: this process forks, and goes on in its grandchild, as for a launch. The cgroup does not exist afterwards
    either if the guard has ended, as the inner one may have. Raises: LaunchError, also where descriptors run out in it.
    """
    try:
        with _guarded_process(notify, environ) as setup:
            yield setup
    except OSError as error:
        raise fd_shortage_error(error) from None


@contextmanager
def _guarded_process(notify: Notify, environ: Mapping[str, str]) -> Iterator[LaunchSetup]:
    folder = choose_private_path(environ)
    link = fork_supervisor(notify, workers=1, grace_seconds=GRACE_SECONDS, directory=folder)
    try:
        make_private_path(folder)
        if link.cgroup is not None:
            link.cgroup.wait_until_inside()
        child = ChildSetup(environ=environ, inherited=link.inherited, control=link.control)
        yield LaunchSetup(child=child, folder=folder)
    finally:
        remove_run_directory(folder)
        if link.cgroup is not None and _has_ended(link.control):
            link.cgroup.remove()


def _has_ended(control: int) -> bool:
    """Whether no guard has the other end of its pipe any more, be there unread signals in it or not."""
    poll = select.poll()
    poll.register(control, 0)  # POLLHUP is told always.
    return bool(poll.poll(0))
