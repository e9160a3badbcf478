"""Mistakes in starting the hosts of a job: each is an error that names it in time, and leaves nothing behind."""

import signal
import socket
import sys

import pytest
from two_hosts import HERE, eventually, marked

pytestmark = [pytest.mark.root, pytest.mark.torch, pytest.mark.slow]

SHOW = [HERE / "show_variables.py", "RANK"]
STATIC = ["--master-addr", "10.77.0.1", "--rdzv-conf", "join_timeout=60"]
C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29400"]


def assert_nothing_left(network, *runs):
    for run in runs:
        run.gone()
    assert not list(network.dir.glob("cpulaunch-*"))
    assert not list(network.dir.glob("torchelastic_*"))


def test_two_hosts_with_one_number_fail_with_the_reason_on_both(network):
    a = network.cpulaunch("a", "--nnodes", 2, "--node-rank", 0, *STATIC, *SHOW)
    b = network.cpulaunch("b", "--nnodes", 2, "--node-rank", 0, *STATIC, *SHOW)
    assert (a.wait(), b.wait()) == (125, 125)
    assert "two hosts have the same --node-rank: 0" in a.err
    assert "two hosts have the same --node-rank: 0" in b.err
    assert "Traceback" not in a.err + b.err
    assert a.reports == b.reports == []
    assert_nothing_left(network, a, b)


def test_a_host_with_another_nnodes_is_refused_and_the_right_one_can_still_join(network):
    a = network.cpulaunch("a", "--nnodes", 2, *C10D, *SHOW)
    eventually(lambda: b"python" in network.listeners("a"), f"a store on host a: {a.err}")
    wrong = network.cpulaunch("b", "--nnodes", 3, *C10D, *SHOW)
    assert wrong.wait() == 125
    assert f"the hosts disagree on --nnodes: 3 on {socket.gethostname()}, 2 on the first host to connect" in wrong.err
    right = network.cpulaunch("b", "--nnodes", 2, *C10D, *SHOW)
    assert (a.wait(), right.wait()) == (0, 0)
    assert_nothing_left(network, a, wrong, right)


def test_missing_hosts_are_an_error_after_join_timeout(network):
    a = network.cpulaunch("a", "--nnodes", 2, *C10D, "--rdzv-conf", "join_timeout=1", *SHOW)
    assert a.wait() == 125
    assert (
        "cpulaunch: error: not all hosts joined: --nnodes 2 (10.77.0.1:29400, in 1 s (--rdzv-conf join_timeout=N))"
        in a.err
    )
    assert "Traceback" not in a.err
    assert_nothing_left(network, a)


def test_an_unreachable_endpoint_is_named_after_join_timeout(network):
    b = network.cpulaunch("b", "--nnodes", 2, *C10D, "--rdzv-conf", "join_timeout=1", *SHOW)
    alone = network.cpulaunch("b", "--nnodes", 2, "--node-rank", 1, *STATIC[:2], "--rdzv-conf", "join_timeout=1", *SHOW)
    assert (b.wait(), alone.wait()) == (125, 125)
    assert (
        "cpulaunch: error: the rendezvous endpoint cannot be reached: 10.77.0.1:29400 (Connection refused, for 1 s)"
        in b.err
    )
    assert "10.77.0.1:29500" in alone.err
    assert_nothing_left(network, b, alone)


def test_a_host_name_that_does_not_resolve_is_named(network):
    options = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "no-such-host.invalid:29400"]
    b = network.cpulaunch("b", *options, "--rdzv-conf", "join_timeout=1", *SHOW)
    assert b.wait() == 125
    assert "cpulaunch: error: host name does not resolve: no-such-host.invalid (--rdzv-endpoint" in b.err
    assert_nothing_left(network, b)


def test_ctrl_c_ends_a_host_that_waits_for_others_at_once(network):
    a = network.cpulaunch("a", "--nnodes", 2, *C10D, *SHOW)
    eventually(lambda: b"python" in network.listeners("a"), f"a store on host a: {a.err}")
    a.process.send_signal(signal.SIGINT)
    assert a.wait() == 130
    assert_nothing_left(network, a)


def test_a_rendezvous_port_in_use_is_named_with_its_holder(network):
    code = "import socket; s = socket.create_server(('', 29500)); print('{}', flush=True); s.accept(); s.accept()"
    holder = network.start("a", sys.executable, "-c", code)
    eventually(lambda: holder.reports, "a listener")
    a = network.cpulaunch("a", "--nnodes", 2, "--node-rank", 0, *STATIC, *SHOW)
    assert a.wait() == 125
    assert "cpulaunch: error: cannot listen on the rendezvous port: 29500 (in use by " in a.err
    assert f"pid {holder.process.pid}" in a.err
    assert_nothing_left(network, a)
    assert marked(holder.mark)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rdzv-backend", "etcd"], "pip install python-etcd"),
        (["--rdzv-backend", "nosuch"], "'nosuch' is not registered"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_a_rendezvous_that_torch_lacks_is_a_usage_error(network, options, said):
    a = network.cpulaunch("a", "--nnodes", 2, "--rdzv-endpoint", "10.77.0.1:29400", *options, *SHOW)
    assert a.wait() == 2
    assert said in a.err
    assert "Traceback" not in a.err
    assert_nothing_left(network, a)
