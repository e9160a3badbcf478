import shutil
import subprocess

import pytest

from tests.launch.launching import Launcher


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


def unshare_refusal():
    """Why this test may not make mount and pid namespaces; None if it may."""
    if shutil.which("unshare") is None:
        return "no program unshare"
    command = ["unshare", "-m", "-p", "--fork", "true"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip() or None


@pytest.fixture
def namespaces():
    """Skips a test where namespaces cannot be made."""
    if refusal := unshare_refusal():
        pytest.skip(refusal)
