"""The parts that several hosts need and that need no second host."""

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpulaunch.launch.hosts import shim
from cpulaunch.launch.hosts.agent.config import check_event_handler, make_logs_specs, newer_values, supported_values
from cpulaunch.launch.hosts.agent.files import agent_config_file, agent_report_file, rank_config_file
from cpulaunch.launch.hosts.agent.messages import (
    MAX_BYTES,
    MAX_REPORT,
    AgentConfig,
    AgentReport,
    RankConfig,
    read_message,
    write_message,
)
from cpulaunch.launch.hosts.agent.reachability import is_this_host, wait_until_reachable
from cpulaunch.launch.hosts.agent.rendezvous import HostRendezvous, compare_hosts
from cpulaunch.launch.hosts.engine import _ending_seconds, rank_config
from cpulaunch.launch.hosts.result import job_result, read_report
from cpulaunch.launch.process.bind import Binding
from cpulaunch.launch.process.exec_spec import ExecSpec
from cpulaunch.launch.process.run_directory import in_run_directory, make_private_path, remove_run_directory
from cpulaunch.launch.supervision.error_file import MAX_TRACEBACK
from cpulaunch.launch.supervision.failure_text import summary
from cpulaunch.launch.supervision.result import LaunchResult, WorkerResult
from cpulaunch.records.endpoint import split_endpoint, with_brackets
from cpulaunch.records.errors import LaunchError, ProbeError, UsageError
from cpulaunch.records.plan import JobPlan, Rendezvous, StreamsPlan
from cpulaunch.records.record import replace
from cpulaunch.system import loopback_store
from cpulaunch.system.files.reading import mark_lost
from cpulaunch.system.files.writing import create
from cpulaunch.system.routes import Route, route_to

SHIM = Path(shim.__file__)
AGENT = SHIM.with_name("agent") / "main.py"
ROOT = SHIM.parents[3]
NO_NAME = ".".join(["no-such-host"] * 30)
"""Too long for a name (RFC 1035: 255 bytes), so no name service is asked, which may take its time to answer."""


def job(backend="static", endpoint="a:1", *, run_id="one", conf=(), hosts=(2, 2), **changes):
    rendezvous = Rendezvous(backend=backend, endpoint=endpoint, id=run_id, conf=tuple(conf))
    plan = JobPlan(
        engine="elastic",
        hosts=hosts,
        host_rank=0,
        local_world_size=1,
        role="default",
        rendezvous=rendezvous,
        master_addr="a",
        master_port=None,
        max_restarts=0,
        streams=StreamsPlan(redirects=(0,), tee=(0,)),
    )
    return replace(plan, **changes)


def config(job_plan, *, grace_seconds=30.0):
    return AgentConfig(job=job_plan, log_dir="logs", shown=None, grace_seconds=grace_seconds, shim=("python",))


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("node0:29400", ("node0", 29400)),
        ("node0", ("node0", 7)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[fe80::1]:29400", ("fe80::1", 29400)),
        ("[fe80::1]", ("fe80::1", 7)),
        ("fe80::1", ("fe80::1", 7)),
        ("fe80::1:29400", ("fe80::1", 29400)),
        ("", ("localhost", 7)),
        (":29400", ("localhost", 29400)),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint, parts):
    assert split_endpoint(endpoint, default_port=7) == parts


@pytest.mark.parametrize("endpoint", ["::1", "fe80::1", "fe80::1:29400", "[::1]:29400", "node0:1", "node0", ""])
@pytest.mark.torch
def test_torch_reads_an_endpoint_as_it_is_read_here(endpoint):
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    assert parse_rendezvous_endpoint(with_brackets(endpoint), 7) == split_endpoint(endpoint, default_port=7)


@pytest.mark.parametrize("endpoint", ["node0:", "node0:http", "node0:65536", "node0:-1", "node0:" + "9" * 5000])
def test_an_invalid_port_is_a_usage_error(endpoint):
    with pytest.raises(UsageError, match="invalid port"):
        split_endpoint(endpoint, default_port=7)


def route(endpoint, said=None):
    return route_to(endpoint, source="--rdzv-endpoint", patience_seconds=0, notify=(said or []).append)


@pytest.mark.parametrize("endpoint", ["localhost:29400", "127.0.0.1:29400"])
def test_the_route_to_this_host_is_loopback(endpoint):
    assert route(endpoint).interface == "lo"


def test_a_route_has_no_interface_in_a_sandbox_that_lists_none(monkeypatch):
    def refuse():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("psutil.net_if_addrs", refuse)
    assert route("127.0.0.1:29400") == Route("127.0.0.1", None)


def test_a_name_that_does_not_resolve_is_named_with_its_option():
    with pytest.raises(ProbeError) as error:
        route("no-such-host.invalid:29400")
    assert str(error.value).startswith("host name does not resolve: no-such-host.invalid (--rdzv-endpoint; ")


def test_the_wait_for_a_name_that_does_not_resolve_is_announced_once():
    said = []
    with pytest.raises(ProbeError):
        route_to(NO_NAME, source="--master-addr", patience_seconds=0.6, notify=said.append)
    assert said == [f"waiting up to 0.6 s for host name {NO_NAME} to resolve"]


@pytest.mark.parametrize(("host", "here"), [("localhost", True), ("127.0.0.3", True), ("192.0.2.1", False)])
def test_an_address_is_this_hosts_own_or_another_ones(host, here):
    assert is_this_host(host) is here


def test_the_own_host_name_is_this_host():
    assert is_this_host(socket.gethostname())


def test_a_server_is_reached_and_a_closed_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        wait_until_reachable("127.0.0.1", port, timeout_seconds=5, notify=print)
    with pytest.raises(LaunchError, match="cannot be reached") as error:
        wait_until_reachable("127.0.0.1", port, timeout_seconds=0, notify=print)
    assert f"127.0.0.1:{port} (Connection refused" in str(error.value)


@pytest.mark.parametrize(
    ("backend", "conf", "join", "connect"),
    [
        ("static", {}, 900, 900),
        ("static", {"timeout": "5"}, 5, 5),
        ("static", {"join_timeout": "5", "timeout": "9"}, 5, 5),
        ("c10d", {}, 600, 600),
        ("c10d", {"join_timeout": "7"}, 7, 7),
        ("c10d", {"join_timeout": "7", "read_timeout": "3"}, 7, 3),
        ("c10d", {"join_timeout": "soon"}, 600, 600),
    ],
)
def test_how_long_hosts_wait_follows_the_rendezvous_settings(backend, conf, join, connect):
    rendezvous = HostRendezvous(job(backend, conf=conf.items()))
    assert (rendezvous.join_seconds, rendezvous.connect_seconds) == (join, connect)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("different", "said"),
    [
        ({"hosts": (3, 3)}, "the hosts disagree on --nnodes"),
        ({"run_id": "other"}, "the hosts disagree on --rdzv-id"),
        ({"host_rank": 0}, "two hosts have the same --node-rank"),
        ({}, None),
    ],
    ids=["nnodes", "rdzv-id", "node-rank", "alike"],
)
def test_hosts_of_a_static_job_agree_or_all_of_them_fail_with_the_reason(different, said):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    conf = [("join_timeout", "60")]
    jobs = [
        job(endpoint=endpoint, conf=conf),
        job(endpoint=endpoint, conf=conf, **{"host_rank": 1} | different),
    ]
    with ThreadPoolExecutor(2) as hosts:
        compared = [hosts.submit(compare_hosts, HostRendezvous(each)) for each in jobs]
        errors = [str(each.exception(timeout=60) or "") for each in compared]
    assert [(said or "nothing") in error for error in errors] == [said is not None] * 2, errors
    if "host_rank" in different:  # As when the host of a rank is started again.
        assert any(f"where {socket.gethostname()} (pid {os.getpid()}) has it" in error for error in errors), errors
        assert any("if one was started again, start all of them again" in error for error in errors), errors


def filtered(out, err):
    return StreamsPlan(redirects=(0,), tee=(0,), filters=(out, err))


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_server_that_accepts_connections_and_never_answers_is_an_error(backend, monkeypatch):
    """As another user may start one at the port before the job."""
    from cpulaunch.launch.hosts.agent import rendezvous

    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.1)
    conf = [("timeout", "1"), ("read_timeout", "1"), ("is_host", "0")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        joining = HostRendezvous(job(backend, endpoint, conf=conf, host_rank=1))
        with pytest.raises(LaunchError, match=f"does not answer: {endpoint} .* did not answer in 1.1 s"):
            compare_hosts(joining)


@pytest.mark.torch
@pytest.mark.parametrize("conf", [[], [("is_host", "0")]])
def test_a_store_of_another_user_on_this_host_is_not_used(monkeypatch, conf):
    """torch runs what the store of a c10d rendezvous has, which may be code."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        owner = loopback_store.owner_of_server
        monkeypatch.setattr(
            loopback_store, "owner_of_server", lambda *asked: 12345 if asked == (place,) else owner(*asked)
        )
        endpoint = f"127.0.0.1:{place[1]}"
        with pytest.raises(LaunchError, match=f"another user listens .*: {endpoint} .*12345"):
            compare_hosts(HostRendezvous(job("c10d", endpoint, conf=conf)))


@pytest.mark.parametrize("fails", [False, True])
def test_a_name_of_this_host_that_does_not_resolve_is_told(monkeypatch, fails):
    from cpulaunch.launch.hosts.agent import rendezvous

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def fail(*_, serving, **__):
        if serving or fails:
            raise RuntimeError
        ended.wait(60)  # torch's own store asks for the name again until its timeout, and a while longer.

    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "_tcp_store", fail)
    endpoint = f"{socket.gethostname()}:29400"
    try:
        with pytest.raises(LaunchError, match=f"cannot be reached: {endpoint} .the name does not resolve"):
            compare_hosts(HostRendezvous(job("c10d", endpoint, conf=[("read_timeout", "0.1")])))
    finally:
        ended.set()


@pytest.mark.torch
def test_a_port_that_is_taken_and_has_no_server_is_told():
    """As another user may take it, to listen there later."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(LaunchError, match=f"cannot listen on the rendezvous port: {port} "):
            compare_hosts(HostRendezvous(job("c10d", f"127.0.0.1:{port}", conf=[("read_timeout", "1")])))


@pytest.mark.parametrize(
    ("changes", "known", "passed"),
    [
        ({}, {"shutdown_timeout"}, {"shutdown_timeout": 30}),
        ({}, {}, {}),  # A default needs no field.
        ({"virtual_local_rank": True}, {"virtual_local_rank"}, {"virtual_local_rank": True}),
        ({"streams": filtered(("x",), ())}, {"duplicate_stdout_filters"}, {"duplicate_stdout_filters": ["x"]}),
        ({"event_log_handler": "console"}, {"event_log_handler"}, {"event_log_handler": "console"}),
    ],
)
def test_a_torch_gets_those_fields_that_it_has(changes, known, passed):
    assert supported_values(newer_values(config(job(**changes))), frozenset(known), version="2.5.0") == passed


@pytest.mark.parametrize(("grace", "timeout"), [(0, 0), (0.2, 1), (30, 30)])
def test_the_agent_waits_for_whole_seconds(grace, timeout):
    assert newer_values(config(job(), grace_seconds=grace))["shutdown_timeout"] == timeout


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"virtual_local_rank": True}, "--virtual-local-rank"),
        ({"signals": ("SIGTERM",)}, "--signals-to-handle"),
        ({"streams": filtered((), ("x",))}, "--duplicate-stderr-filters"),
    ],
)
def test_an_option_that_the_installed_torch_lacks_is_named_with_its_version(changes, option):
    with pytest.raises(UsageError) as error:
        supported_values(newer_values(config(job(**changes))), frozenset({"shutdown_timeout"}), version="2.5.0")
    assert str(error.value).startswith(f"the installed torch does not support an option: {option} (torch 2.5.0)")


def test_the_first_of_several_options_that_the_installed_torch_lacks_is_named():
    values = newer_values(config(job(signals=("SIGTERM",), virtual_local_rank=True, event_log_handler="console")))
    for supported in ({"shutdown_timeout"}, {"shutdown_timeout", "event_log_handler"}):
        with pytest.raises(UsageError, match="--signals-to-handle"):
            supported_values(values, frozenset(supported), version="2.5.0")


MESSAGES = {
    "agent": config(job(conf=[("join_timeout", "5")], streams=filtered(("x",), ("y", "z")))),
    "rank": RankConfig(path="/p", argv=("p", "x"), env=(("A", "1"), ("B", None)), cpus=(0, 2), policy=(1, (0,))),
    "report": AgentReport(exit_code=3),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_a_message_is_read_as_it_was_written(tmp_path, message):
    write_message(str(tmp_path / "message"), message)
    assert read_message(str(tmp_path / "message"), type(message)) == message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"record": "AgentReport", "exit_code": 0, "extra": 1}', "no field 'extra'"),
        ('{"record": "AgentReport"}', "needs a value for 'exit_code'"),
        ('{"record": "RankConfig", "path": "p", "argv": []}', "holds no AgentReport"),
        ('{"exit_code": 0}', "no record of a message"),
    ],
)
def test_a_message_with_unknown_or_missing_fields_is_an_error(tmp_path, text, reason):
    (tmp_path / "message").write_text(text)
    with pytest.raises(TypeError, match=reason):
        read_message(str(tmp_path / "message"), AgentReport)


FAILED = {"record": "RankFailure", "rank": 0, "local_rank": 0, "pid": 7, "exit_code": -9, "timestamp": 1}
ENDED = {"record": "AgentReport", "exit_code": 1, "failures": [FAILED]}


@pytest.mark.parametrize(
    "forged",
    [
        ENDED | {"exit_code": "0"},
        ENDED | {"exit_code": 10**300},
        ENDED | {"restarts": None},
        ENDED | {"error": "why"},
        ENDED | {"error": {"record": "AgentError", "what": 3, "value": None, "source": None, "hint": None}},
        *(
            ENDED
            | {"error": {"record": "AgentError", "what": "no", "value": None, "source": None, "hint": None} | wrong}
            for wrong in ({"value": []}, {"source": []}, {"hint": 0})
        ),
        ENDED | {"failures": [0]},
        ENDED | {"failures": {"record": "RankPipe", "descriptor": 1, "path": "", "agent_path": ""}},
        *(
            ENDED | {"failures": [FAILED | wrong]}
            for wrong in (
                {"rank": "0"},
                {"local_rank": -1},
                {"exit_code": 10**300},
                {"timestamp": 10**300},
                {"log": ["/etc/hosts"]},
                {"traceback": {"a": 1}},
                {"traceback": []},
                {"traceback": 0},
                {"log": []},
            )
        ),
    ],
    ids=lambda forged: json.dumps(forged)[-60:],
)
def test_a_report_that_a_rank_forged_counts_as_none(tmp_path, forged):
    (tmp_path / "report.json").write_text(json.dumps(ENDED))
    assert read_report(str(tmp_path)).failures[0].exit_code == -9
    (tmp_path / "report.json").write_text(json.dumps(forged))
    assert read_report(str(tmp_path)) is None


def result_of(tmp_path, exit_code, forged, *, signal=None):
    """How a job ended whose report is this, though its agent has ended with this code, or by this signal."""
    (tmp_path / "report.json").write_text(json.dumps(forged))
    rank = SimpleNamespace(routes=(), last_lines=lambda: ())
    ended = WorkerResult(index=0, pid=1, exit_code=None, signal=signal)
    agent = LaunchResult(exit_code=exit_code, host="here", workers=() if signal is None else (ended,))
    return job_result(job(), agent, report=read_report(str(tmp_path)), output=SimpleNamespace(ranks=((rank, rank),)))


@pytest.mark.parametrize(("status", "code"), [(3, 3), (143, 143)], ids=["before the signal", "forged"])
def test_a_rank_that_has_failed_before_a_signal_decides_the_exit_code(tmp_path, status, code):
    (tmp_path / "report.json").write_text(json.dumps(ENDED | {"exit_code": 3, "failures": [FAILED]}))
    ended = WorkerResult(index=0, pid=1, exit_code=status, signal=None)
    agent = LaunchResult(exit_code=143, ended_by=15, host="here", workers=(ended,))
    rank = SimpleNamespace(routes=(), last_lines=lambda: ())
    result = job_result(job(), agent, report=read_report(str(tmp_path)), output=SimpleNamespace(ranks=((rank, rank),)))
    assert (result.exit_code, result.first_failure) == (code, 0 if code == 3 else None)


ERROR = {"record": "AgentError", "what": "no", "value": None, "source": None, "hint": None}


@pytest.mark.parametrize("forged", [ENDED | {"error": ERROR}, ENDED])
def test_a_job_whose_agent_ended_well_has_succeeded_whatever_a_rank_wrote(tmp_path, forged):
    result = result_of(tmp_path, 0, forged)
    assert (result.exit_code, result.first_failure, result.workers) == (0, None, ())
    if "error" in forged:
        with pytest.raises(LaunchError, match="no"):
            result_of(tmp_path, 125, forged | {"exit_code": 125})
        for code in (3, 127):
            assert result_of(tmp_path, 3, forged | {"exit_code": code}).exit_code == 3
        with pytest.raises(LaunchError, match="without a report"):
            result_of(tmp_path, 137, forged | {"exit_code": 137}, signal=9)


def test_a_job_whose_agent_ended_well_has_succeeded_also_if_a_rank_removed_the_report(tmp_path):
    agent = LaunchResult(exit_code=0, host="here", workers=())
    result = job_result(job(), agent, report=read_report(str(tmp_path)), output=SimpleNamespace(ranks=()))
    assert result.exit_code == 0


def test_a_rank_that_removed_the_report_decides_the_exit_code_as_the_agents(tmp_path):
    ended = WorkerResult(index=0, pid=1, exit_code=9, signal=None)
    agent = LaunchResult(exit_code=9, host="here", workers=(ended,))
    result = job_result(job(), agent, report=read_report(str(tmp_path)), output=SimpleNamespace(ranks=()))
    assert (result.exit_code, result.first_failure) == (9, None)


@pytest.mark.parametrize("log", ["a\0b", "\ud900", "x" * 5000])
def test_a_log_whose_path_is_none_has_no_last_lines(tmp_path, log):
    result = result_of(tmp_path, 3, ENDED | {"failures": [FAILED | {"log": log}]})
    assert result.workers[0].last_lines == ()
    assert all(line.isprintable() for line in summary(result))


def test_of_a_traceback_of_any_length_the_beginning_is_shown(tmp_path):
    """Else a rank that records millions of lines would hold the launch for as long as it takes to write them."""
    result = result_of(
        tmp_path, 3, ENDED | {"failures": [FAILED | {"traceback": "first" + "\n" * (MAX_TRACEBACK + 1)}]}
    )
    assert result.workers[0].error.text.startswith("first\n")
    assert len(result.workers[0].error.text) <= MAX_TRACEBACK


@pytest.mark.torch
def test_the_agent_reports_how_a_rank_failed_whatever_the_length_of_its_traceback(tmp_path):
    """A longer report than is read would be none: 125 instead of the rank's exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from cpulaunch.launch.hosts.agent.failures import RecordedFailure, job_report

    error_file = tmp_path / "error.json"
    error_file.write_text(
        json.dumps({"message": {"message": "\n" * (MAX_BYTES // 2), "extraInfo": {"timestamp": "1"}}})
    )
    failure = RecordedFailure(local_rank=0, pid=7, exitcode=3, error_file=str(error_file))

    def run():
        raise ChildFailedError("train.py", {0: failure})

    write_message(agent_report_file(str(tmp_path)), job_report(run, logs_specs=None))
    assert read_report(str(tmp_path)).failures[0].exit_code == 3


@pytest.mark.torch
@pytest.mark.parametrize("code", [-9, -15, 5])
def test_a_rank_that_torch_ended_in_the_second_of_the_first_failure_is_not_the_first(monkeypatch, code):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from cpulaunch.launch.hosts.agent.failures import RecordedFailure, job_report

    monkeypatch.setattr("time.time", lambda: 100.0)

    def run():
        failures = [RecordedFailure(local_rank=1 - at, pid=7, exitcode=[3, code][at], error_file="") for at in (0, 1)]
        raise ChildFailedError("train.py", {failure.local_rank: failure for failure in failures})

    report = job_report(run, logs_specs=None)
    assert (report.exit_code, [failure.rank for failure in report.failures]) == (3, [1, 0])


@pytest.mark.torch
def test_the_report_of_a_hundred_ranks_that_recorded_long_tracebacks_is_read(tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from cpulaunch.launch.hosts.agent.failures import RecordedFailure, job_report

    error_file = tmp_path / "error.json"
    error_file.write_text(json.dumps({"message": "\U0001f600" * (MAX_TRACEBACK + 1), "timestamp": 1}))

    def run():
        failures = [
            RecordedFailure(local_rank=rank, pid=7, exitcode=3, error_file=str(error_file)) for rank in range(100)
        ]
        raise ChildFailedError("train.py", dict(enumerate(failures)))

    write_message(agent_report_file(str(tmp_path)), job_report(run, logs_specs=None))
    failures = read_report(str(tmp_path)).failures
    assert "characters left out" in failures[0].traceback
    assert MAX_TRACEBACK // 2 < len(failures[0].traceback) <= MAX_TRACEBACK
    assert not any(each.traceback for each in failures[1:])


def test_a_report_that_a_rank_has_made_long_takes_no_memory_as_objects(tmp_path):
    failures = [FAILED] * (MAX_REPORT // len(json.dumps(FAILED)))
    (tmp_path / "report.json").write_text(json.dumps(ENDED | {"failures": failures}))
    assert read_report(str(tmp_path)) is None


@pytest.mark.torch
@pytest.mark.parametrize(
    ("content", "traceback"),
    [
        (b"", None),
        (b'{"message": {"mess', None),
        (b"[]", None),
        (b"[" * 100_000, None),
        (b'{"message": "\xff"}', "\ufffd"),
        (b'{"timestamp": 5}', None),
        (b'{"message": "read", "timestamp": -5}', "read"),
        (b'{"message": "read", "timestamp": "%s"}' % (b"9" * 400), "read"),
        (b'{"message": "read", "timestamp": 253402300800}', "read"),
        (b'{"message": "read", "timestamp": Infinity}', "read"),
        (b'{"message": {"extraInfo": []}}', None),
        (b'{"message": {"message": "read"}}', "read"),
        (b'{"message": {"message": null, "extraInfo": {"timestamp": "1"}}}', None),
        (b'{"message": {"message": "no", "extraInfo": {"timestamp": "1", "py_callstack": ["no"]}}}', None),
    ],
)
def test_the_agent_reports_how_a_rank_failed_whatever_is_in_its_error_file(tmp_path, content, traceback):
    """Else the launch would end with 2 or 125 instead of the rank's exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from cpulaunch.launch.hosts.agent.failures import RecordedFailure, job_report

    error_file = tmp_path / "error.json"
    error_file.write_bytes(content)

    def run():
        failure = RecordedFailure(local_rank=0, pid=7, exitcode=3, error_file=str(error_file))
        raise ChildFailedError("train.py", {0: failure})

    write_message(agent_report_file(str(tmp_path)), job_report(run, logs_specs=None))
    (failed,) = read_report(str(tmp_path)).failures
    assert (failed.exit_code, failed.traceback) == (3, traceback)


@pytest.mark.torch
def test_torchs_event_on_a_failure_has_the_texts_that_the_rank_recorded(tmp_path):
    """As under torchrun: handlers of events (--event-log-handler) look for them there."""
    from cpulaunch.launch.hosts.agent.failures import RecordedFailure

    recorded = {"message": {"message": "Error: no", "extraInfo": {"py_callstack": "Traceback", "timestamp": "5"}}}
    error_file = tmp_path / "error.json"
    error_file.write_text(json.dumps(recorded | {"deep": []}).replace("[]", "[" * 900 + "]" * 900))
    failure = RecordedFailure(local_rank=0, pid=7, exitcode=3, error_file=str(error_file))
    assert failure.error_file_data == recorded


def test_the_agent_replaces_a_folder_that_a_rank_has_made_in_place_of_its_report(tmp_path):
    """Else the launch would end with 125 instead of the rank's exit code."""
    deep = tmp_path / "report.json/a/b"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    deep.parent.chmod(0)
    write_message(agent_report_file(str(tmp_path)), AgentReport(exit_code=3))
    assert read_report(str(tmp_path)) == AgentReport(exit_code=3)


def test_the_agent_replaces_a_report_that_a_rank_has_written(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "report.json").symlink_to(tmp_path / "theirs")
    write_message(agent_report_file(str(tmp_path)), AgentReport(exit_code=3))
    assert read_report(str(tmp_path)) == AgentReport(exit_code=3)
    assert (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.parametrize("report", [AgentReport(exit_code=3), None])
def test_the_report_is_found_in_a_run_directory_that_a_rank_has_renamed(tmp_path, report):
    """`report`: None if there was no space for it."""
    run = str(tmp_path / "run")
    make_private_path(run)
    name, folder = in_run_directory(agent_report_file(run))
    os.rename(run, tmp_path / "renamed")
    if report is None:
        os.close(create(name, folder=folder))
        mark_lost(name, folder=folder)
    else:
        (tmp_path / "renamed" / name / "deep").mkdir(parents=True)
        write_message(name, report, folder=folder)
    assert read_report(run) == (report or AgentReport(exit_code=0))
    remove_run_directory(run)


@pytest.mark.parametrize(("age", "seconds"), [(100, 105), (-1000, 5)], ids=["noted", "forged"])
def test_what_ranks_leave_has_the_time_since_the_agent_began_to_end_them(tmp_path, age, seconds):
    run = str(tmp_path / "run")
    assert _ending_seconds(run, failed=True) == 5
    make_private_path(run)
    path = Path(agent_config_file(run))
    path.touch()
    os.utime(path, (path.stat().st_mtime - age,) * 2)
    os.rename(run, tmp_path / "renamed")
    assert seconds <= _ending_seconds(run, failed=True) < seconds + 60
    assert _ending_seconds(run, failed=False) == 5, "the agent has not ended them"
    remove_run_directory(run)


def become(tmp_path, argv, *, changes=(), cpus=(), environ=None, agent=None):
    """How the shim ended that had this to execute."""
    spec = ExecSpec(worker=0, path=argv[0], argv=tuple(argv), environ={}, binding=Binding(cpus=frozenset(cpus)))
    write_message(rank_config_file(str(tmp_path), 0), rank_config(spec, changes, ()))
    command = [sys.executable, "-I", "-S", str(SHIM), str(tmp_path), "0", str(agent or os.getpid())]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=60)


def test_the_shim_binds_changes_the_environment_and_becomes_the_rank(tmp_path):
    cpu = max(os.sched_getaffinity(0))
    code = (
        "import os, signal; print(sorted(os.sched_getaffinity(0)), os.environ.get('A'), os.environ.get('B'), "
        "os.environ['LOCAL_RANK'], signal.getsignal(signal.SIGPIPE).name)"
    )
    done = become(
        tmp_path,
        [sys.executable, "-c", code],
        changes=[("A", "1"), ("B", None)],
        cpus={cpu},
        environ={"B": "2", "LOCAL_RANK": "0"},
    )
    assert (done.stdout, done.stderr) == (f"[{cpu}] 1 None 0 SIG_IGN\n", "")


@pytest.mark.parametrize("safe", ["", "1"], ids=["", "safe-path"])
def test_the_agent_finds_torch_on_the_users_path(tmp_path, safe):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "torch.py").write_text("raise ImportError('theirs')\n")
    write_message(agent_config_file(str(tmp_path)), config(job("c10d", "localhost:0", hosts=(1, 1))))
    env = os.environ | {"PYTHONPATH": str(theirs), "PYTHONSAFEPATH": safe}
    done = subprocess.run([sys.executable, str(AGENT), str(tmp_path)], env=env, check=False, timeout=60)
    assert done.returncode == 125
    assert read_report(str(tmp_path)).error.source == "theirs"


def launched(tmp_path, before, *job):
    """How a launch ended that ran `before` in its own process first, once all processes have closed its output."""
    (tmp_path / "script.py").touch()
    code = f"import os, resource, runpy, sys\n{before}\nrunpy.run_module('cpulaunch', run_name='__main__')"
    command = [sys.executable, "-c", code, "--nnodes", "2", *job, str(tmp_path / "script.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)


def test_a_full_disk_is_one_error_and_leaves_no_directory(tmp_path):
    nothing_fits = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    done = launched(tmp_path, nothing_fits, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:1")
    assert done.returncode == 125
    assert done.stderr.startswith(f"cpulaunch: error: cannot write the files of this run: {tmp_path}")
    assert done.stderr.count("\n") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


FILL = """
import os, sys
with open(os.environ["TMPDIR"] + "/full", "wb", buffering=0) as file:
    while True:
        try:
            file.write(bytes(1 << 12))
        except OSError:
            break
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("code", [0, 3])
def test_a_job_ends_as_its_ranks_where_the_agent_finds_no_space_for_its_report(tmp_path, code):
    (tmp_path / "fill.py").write_text(FILL)
    (tmp_path / "small").mkdir()
    small = f'mount -t tmpfs -o size=256k tmpfs {tmp_path}/small && exec "$@"'
    command = [sys.executable, "-m", "cpulaunch", "--logs-specs", "default", "fill.py", str(code)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", small, "sh", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "small")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    lines = ["cannot write how the ranks ended: [Errno 28] No space left on device", "the job failed: exit code 3"]
    assert [line.removeprefix("cpulaunch: ") for line in done.stderr.splitlines()] == lines[: 2 if code else 1]


def test_an_agent_that_did_not_come_to_its_report_is_an_error(tmp_path):
    (tmp_path / "report.json").touch(0o600)
    assert read_report(str(tmp_path)) is None


def test_a_launcher_killed_as_soon_as_its_directory_exists_leaves_none(tmp_path):
    killed_after_mkdir = """
launcher, made = os.getpid(), []
def hook(event, arguments):
    if made and made.pop():
        os.kill(launcher, 9)
    if event == "os.mkdir":
        made.append(True)
sys.addaudithook(hook)"""
    done = launched(tmp_path, killed_after_mkdir, "--node-rank", "1", "--master-addr", "127.0.0.1")
    assert done.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_job_without_ranks_leaves_no_log_directory(tmp_path):
    unreachable = ["--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "1"]
    done = launched(tmp_path, "", *unreachable, "--rdzv-conf", "join_timeout=0", "-t", "3")
    assert (done.returncode, "cannot be reached" in done.stderr) == (125, True)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_the_shim_leaves_no_ignored_signal_to_a_program_that_is_not_python(tmp_path):
    done = become(tmp_path, ["/bin/sh", "-c", "grep SigIgn /proc/self/status"])
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored & (1 << 12)  # SIGPIPE is 13.


@pytest.mark.parametrize(("name", "mode", "code"), [("absent", None, 127), ("plain", 0o644, 126), ("text", 0o755, 126)])
def test_a_program_that_can_no_longer_be_executed_is_one_error(tmp_path, name, mode, code):
    program = tmp_path / name
    if mode is not None:
        program.write_text("neither a program nor a script\n")
        program.chmod(mode)
    done = become(tmp_path, [str(program)])
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("cpulaunch: error: ")
    assert done.stderr.count("\n") == 2


def test_a_shim_whose_agent_has_ended_does_not_become_a_rank(tmp_path):
    done = become(tmp_path, ["/bin/echo", "alive"], agent=1)
    assert (done.returncode, done.stdout) == (-9, "")


@pytest.mark.torch
def test_missing_plugins_are_named_with_their_option():
    with pytest.raises(UsageError, match="unknown event log handler"):
        check_event_handler("nosuch")
    with pytest.raises(UsageError, match="unknown log specification"):
        make_logs_specs(config(job(logs_specs="nosuch")))
