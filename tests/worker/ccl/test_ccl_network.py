"""Whether oneCCL can tell the hosts of a job apart, and the address at which others reach one: without the library."""

import socket

import psutil
import pytest

from cpulaunch.worker.ccl.oneccl.network import check_host_names, own_address
from cpulaunch.worker.ccl.wire.errors import CclError


class Store(dict):
    """torch's store, as far as it is asked here, in which the other ranks have spoken already."""

    def set(self, key, value):
        self[key] = value

    def multi_get(self, keys):
        return [self[key].encode() for key in keys]


@pytest.mark.parametrize("other", ["a boot1 24", "b boot2 24"])
def test_ranks_of_one_host_and_hosts_of_different_names_are_told_apart(other):
    check_host_names(Store({"hosts/0": other}), rank=1, size=2, host="a boot1 24")


@pytest.mark.parametrize("other", ["a boot2 24", "a boot1 77"])
def test_two_hosts_of_one_name_are_refused(other):
    with pytest.raises(CclError, match="the same name, which oneCCL uses to distinguish them: a"):
        check_host_names(Store({"hosts/0": other}), rank=1, size=2, host="a boot1 24")


def test_a_host_says_its_name():
    store = Store()
    check_host_names(store, rank=0, size=1)
    assert store["hosts/0"].startswith(f"{socket.gethostname()} ")


def test_the_address_is_the_interfaces():
    assert own_address({"GLOO_SOCKET_IFNAME": "lo"}) in {place.address for place in psutil.net_if_addrs()["lo"]}


def test_an_interface_that_is_not_there_is_named():
    with pytest.raises(CclError, match="the network interface has no address: none0"):
        own_address({"GLOO_SOCKET_IFNAME": "none0"})
