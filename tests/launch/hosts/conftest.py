import pytest
from two_hosts import Machines, Network, denied


@pytest.fixture(scope="session")
def permitted():
    reason = denied()
    if reason:
        pytest.skip(f"network namespaces are denied here: {reason}")


@pytest.fixture
def network(permitted, tmp_path):
    network = Network(tmp_path)
    try:
        network.open()
        yield network
    finally:
        network.close()


@pytest.fixture
def machines(permitted, tmp_path):
    machines = Machines(tmp_path)
    try:
        machines.open()
        yield machines
    finally:
        machines.close()
