import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from control_groups import ControlGroup, NoControllerError, control_group


@pytest.fixture
def new_group() -> Iterator[Callable[[str], ControlGroup]]:
    """Makes cgroups for a controller; they are gone after the test. Skips where that is not possible."""
    with ExitStack() as stack:

        def make(controller: str) -> ControlGroup:
            if not hasattr(os, "geteuid") or os.geteuid() != 0:
                pytest.skip("needs root to make cgroups")
            try:
                return stack.enter_context(control_group(controller))
            except NoControllerError as error:
                pytest.skip(str(error))

        yield make
