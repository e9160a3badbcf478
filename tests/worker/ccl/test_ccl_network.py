"""Unique names of hosts, and the address of a host for other hosts; these tests do not need oneCCL."""

import socket
import time

import psutil
import pytest

from cpulaunch.worker.ccl.oneccl.network import check_hosts, own_address, this_host
from cpulaunch.worker.ccl.wire.agreement import Agreement
from cpulaunch.worker.ccl.wire.errors import CclError, UnavailableError


class Store(dict):
    """The used part of torch's store, with the values that the other ranks have set."""

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)

    def multi_get(self, keys):
        return [self[key].encode() for key in keys]


@pytest.mark.parametrize("other", ["a boot1 24", "b boot2 24"])
def test_ranks_of_one_host_and_hosts_with_different_names_are_accepted(other):
    check_hosts([other, "a boot1 24"])


@pytest.mark.parametrize("other", ["a boot2 24", "a boot1 77"])
def test_two_hosts_with_the_same_name_are_an_error(other):
    with pytest.raises(UnavailableError, match="the same name, which oneCCL uses to distinguish them: a"):
        check_hosts([other, "a boot1 24"])


def test_a_host_is_known_by_its_name():
    assert this_host().startswith(f"{socket.gethostname()} ")


def test_the_address_is_that_of_the_interface():
    assert own_address({"GLOO_SOCKET_IFNAME": "lo"}) in {place.address for place in psutil.net_if_addrs()["lo"]}


def test_the_error_for_a_missing_interface_names_it():
    with pytest.raises(CclError, match="the network interface has no address: none0"):
        own_address({"GLOO_SOCKET_IFNAME": "none0"})


@pytest.mark.parametrize("kind", [CclError, OSError])
def test_a_problem_of_one_rank_is_the_error_of_all(kind):
    def fails():
        raise kind("/dev/shm is too small")

    for rank, value in enumerate((lambda: "fine", fails)):
        store = Store({"hosts/0": "fine", "hosts/1": "!rank 1: /dev/shm is too small"})
        with pytest.raises(UnavailableError, match="rank 1: /dev/shm is too small"):
            Agreement(store, rank, 2, time.monotonic()).on("hosts", value)
        assert store["hosts/1"] == "!rank 1: /dev/shm is too small"
