"""Unique names of hosts, and the address of a host for other hosts; these tests do not need oneCCL."""

import socket

import psutil
import pytest

from cpulaunch.worker.ccl.oneccl.network import check_hosts, own_address
from cpulaunch.worker.ccl.wire.errors import CclError


class Store(dict):
    """The used part of torch's store, with the values that the other ranks have set."""

    def set(self, key, value):
        self[key] = value

    def multi_get(self, keys):
        return [self[key].encode() for key in keys]


@pytest.mark.parametrize("other", ["a boot1 24", "b boot2 24"])
def test_ranks_of_one_host_and_hosts_with_different_names_are_accepted(other):
    check_hosts(Store({"hosts/0": other}), rank=1, size=2, host="a boot1 24")


@pytest.mark.parametrize("other", ["a boot2 24", "a boot1 77"])
def test_two_hosts_with_the_same_name_are_an_error(other):
    with pytest.raises(CclError, match="the same name, which oneCCL uses to distinguish them: a"):
        check_hosts(Store({"hosts/0": other}), rank=1, size=2, host="a boot1 24")


def test_a_rank_publishes_the_name_of_its_host():
    store = Store()
    check_hosts(store, rank=0, size=1)
    assert store["hosts/0"].startswith(f"{socket.gethostname()} ")


def test_the_address_is_that_of_the_interface():
    assert own_address({"GLOO_SOCKET_IFNAME": "lo"}) in {place.address for place in psutil.net_if_addrs()["lo"]}


def test_the_error_for_a_missing_interface_names_it():
    with pytest.raises(CclError, match="the network interface has no address: none0"):
        own_address({"GLOO_SOCKET_IFNAME": "none0"})


def test_a_problem_of_one_rank_is_the_error_of_all():
    for rank, problem in enumerate(("", "/dev/shm is too small")):
        store = Store({"hosts/0": "a boot1 24", "hosts/1": "!rank 1: /dev/shm is too small"})
        with pytest.raises(CclError, match="rank 1: /dev/shm is too small"):
            check_hosts(store, rank=rank, size=2, problem=problem, host="a boot1 24")
