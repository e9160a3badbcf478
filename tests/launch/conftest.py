import pytest

from tests.launch.launching import Launcher


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()
