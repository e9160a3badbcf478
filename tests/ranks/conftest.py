import shutil

import pytest
from jobs import HERE


@pytest.fixture
def folders(tmp_path):
    """A folder with the program for each of the two tools."""
    made = {}
    for tool in ("torchrun", "cpulaunch"):
        made[tool] = tmp_path / tool
        made[tool].mkdir()
        shutil.copy(HERE / "seen.py", made[tool])
    return made
