"""What the ranks of a group tell each other through the store while they set it up."""

import time
from collections.abc import Callable
from typing import Any

from cpulaunch.records.record import record
from cpulaunch.worker.ccl.wire.errors import CclError, PeerLostError, UnavailableError

PROBLEM = "!"
"""First character of a value in the store that says why a rank cannot join the others."""
FAILURE_KEY = "failed"
"""Key of a group's store with the reason why the group could not be set up on some rank."""
MAX_PAUSE_SECONDS = 0.1


@record(kw_only=False)
class Agreement:
    """A rank's way to agree with the others, until `deadline`, a time of time.monotonic.

    `exited` returns a rank whose process has exited, if there is one.
    """

    store: Any
    rank: int
    size: int
    deadline: float
    exited: Callable[[], int | None] = lambda: None

    def on(self, key: str, value: Callable[[], str] = str) -> list[str]:
        """The values of all ranks: what `value` returns in each. Effect: waits for all; sets the store's KEY/RANK.

        Raises: UnavailableError, in all ranks and with the same reason, if `value` raises OSError or CclError in one of
        them; PeerLostError if a rank exits, or is late; CclError if the set-up of a rank has failed.
        """
        try:
            mine = value()
        except UnavailableError as error:  # What it says is not about this rank alone.
            mine = f"{PROBLEM}{error}"
        except (OSError, CclError) as error:
            mine = f"{PROBLEM}rank {self.rank}: {error}"
        self.store.set(f"{key}/{self.rank}", mine)
        keys = [f"{key}/{other}" for other in range(self.size)]
        self._wait_for(keys)
        values: list[str] = [each.decode() for each in self.store.multi_get(keys)]
        problem = next((each for each in values if each.startswith(PROBLEM)), None)
        if problem is not None:
            raise UnavailableError(problem.removeprefix(PROBLEM))
        return values

    def _wait_for(self, keys: list[str]) -> None:
        pause = 0.001
        while True:
            lost = self.exited()  # Asked first: a rank may tell its value and then exit.
            if self.store.check(keys):
                return
            check_failure(self.store)
            if lost is not None:
                raise PeerLostError(f"rank {lost} of the group exited during set-up")
            if time.monotonic() > self.deadline:
                raise PeerLostError("Timed out waiting for all ranks of the group to join")
            time.sleep(pause)  # store.wait would not notice a rank that exits.
            pause = min(2 * pause, MAX_PAUSE_SECONDS)


def check_failure(store: Any) -> None:
    """Raises: CclError if the set-up of a rank has failed."""
    if store.check([FAILURE_KEY]):
        raise CclError(f"the group cannot be created: {store.get(FAILURE_KEY).decode()}")
