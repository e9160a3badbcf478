"""Jobs as planned: engine, rendezvous, variables of the ranks, and options that are errors."""

import pytest

from cpulaunch.records.errors import UsageError
from cpulaunch.records.plan import JobPlan, LaunchPlan
from cpulaunch.records.request import Program
from cpulaunch.records.value_types import MAX_SECONDS
from tests.plan.machines import SCRIPT, cpuset, machine, plan, quota, replace, request_of

HOST = machine(sockets=2, cores=4)
TWO = "--nproc-per-node 2"
IN_FILE = "--rdzv-backend c10d --rdzv-conf store_type=file"


def job(flags: str, **more: object) -> JobPlan:
    made = plan(HOST, flags, **more).job
    assert made is not None
    return made


def environ_of(made: LaunchPlan, index: int = 0) -> dict[str, str | None]:
    return dict(made.workers[index].env)


def test_any_job_option_makes_a_job_of_ranks() -> None:
    assert plan(HOST, "--standalone").mode == "ranks"
    assert plan(HOST, "--max-restarts 3").mode == "ranks"
    for flags in ("", "--device cpu", "--scheduler none", "--log-dir d"):
        assert plan(HOST, flags).job is None


@pytest.mark.parametrize(
    ("flags", "engine", "backend", "endpoint", "port"),
    [
        (TWO, "native", "c10d", "127.0.0.1:0", None),
        ("--standalone", "native", "c10d", "127.0.0.1:0", None),
        ("--standalone --rdzv-backend etcd --rdzv-endpoint a:1", "native", "c10d", "127.0.0.1:0", None),
        ("--master-port 1234", "native", "static", "127.0.0.1:1234", 1234),
        ("--master-port 0", "native", "static", "127.0.0.1:0", None),
        ("--master-addr ::1 --master-port 5", "native", "static", "[::1]:5", 5),
        ("--rdzv-endpoint a:1", "native", "static", "a:1", 1),
        ("--rdzv-backend c10d --rdzv-endpoint a:29400", "native", "c10d", "a:29400", None),
        ("--rdzv-backend etcd --rdzv-endpoint a:2379", "native", "etcd", "a:2379", None),
        ("--rdzv-backend mine --rdzv-endpoint a,b", "elastic", "mine", "a,b", None),
        ("--logs-specs mine", "elastic", "c10d", "127.0.0.1:0", None),
        ("--event-log-handler console", "elastic", "c10d", "127.0.0.1:0", None),
        ("--rdzv-conf store_type=file", "native", "c10d", "", None),
        ("--standalone --rdzv-conf store_type=file", "native", "c10d", "", None),
        ("--logs-specs mine --rdzv-conf store_type=file", "elastic", "c10d", "", None),
        (f"{IN_FILE} --logs-specs mine", "elastic", "c10d", "", None),
        (f"{IN_FILE} --rdzv-endpoint /a:b:c", "native", "c10d", "/a:b:c", None),
        (f"{IN_FILE} --rdzv-endpoint /a:b:c --nnodes 2", "elastic", "c10d", "/a:b:c", None),
        ("--nnodes 2 --master-addr a", "elastic", "static", "a:29500", 29500),
        ("--nnodes 2 --node-rank 1 --master-addr a --master-port 5", "elastic", "static", "a:5", 5),
        ("--nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint a", "elastic", "c10d", "a", None),
    ],
)
def test_options_select_engine_and_rendezvous(
    flags: str, engine: str, backend: str, endpoint: str, port: int | None
) -> None:
    made = job(flags)
    assert (made.engine, made.rendezvous.backend, made.rendezvous.endpoint) == (engine, backend, endpoint)
    if backend == "static":
        assert made.master_port == port
    else:
        assert made.master_port is None


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        (TWO, "127.0.0.1"),
        ("--standalone", "127.0.0.1"),
        ("--master-addr localhost --master-port 5", "127.0.0.1"),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:5", "127.0.0.1"),
        (f"{IN_FILE} --rdzv-endpoint /shared/store", "127.0.0.1"),
        (f"{IN_FILE} --rdzv-endpoint /shared/a:b", "127.0.0.1"),
        ("--master-addr ::1 --master-port 5", "::1"),
        ("--nnodes 2 --master-addr localhost", "localhost"),
    ],
)
def test_on_one_host_ranks_get_the_loopback_address_instead_of_its_name(flags: str, address: str) -> None:
    assert job(flags).master_addr == address


def test_ranks_get_the_variables_of_torchrun() -> None:
    made = plan(HOST, f"{TWO} --role trainer --max-restarts 2", environ={"RANK": "9", "MASTER_PORT": "1"})
    environ = environ_of(made, 1)
    assert {name: environ[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK")} == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "ROLE_RANK": "1",
        "GROUP_RANK": "0",
    }
    assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"], environ["ROLE_WORLD_SIZE"]) == ("2", "2", "2")
    assert (environ["ROLE_NAME"], environ["TORCHELASTIC_MAX_RESTARTS"]) == ("trainer", "2")
    assert environ["OMP_NUM_THREADS"] == "4"
    assert [(worker.rank, worker.local_rank) for worker in made.workers] == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    "flags",
    ["", "--standalone", "--master-port 29777", "--logs-specs default", "--event-log-handler console"],
)
def test_ranks_of_one_host_listen_on_loopback(flags: str) -> None:
    environ = environ_of(plan(HOST, f"{TWO} {flags}"))
    assert (environ["GLOO_SOCKET_IFNAME"], environ["TP_SOCKET_IFNAME"]) == ("lo", "lo")


def test_user_variables_win_over_the_defaults_of_ranks() -> None:
    users = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    made = plan(HOST, TWO, environ=users)
    assert not users.keys() & environ_of(made).keys()
    assert made.workers[0].threads == 3


@pytest.mark.parametrize("flags", ["--nnodes 2 --master-addr a", "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint a"])
def test_jobs_of_several_hosts_leave_rank_variables_to_the_agent_and_count_the_most_hosts(flags: str) -> None:
    made = plan(HOST, f"{TWO} {flags}")
    assert made.world_size == 4
    assert not {"RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"} & environ_of(made).keys()
    assert [worker.local_rank for worker in made.workers] == [0, 1]


def test_global_ranks_are_known_only_for_numbered_hosts() -> None:
    made = plan(HOST, f"{TWO} --nnodes 2 --node-rank 1 --master-addr a")
    assert [worker.rank for worker in made.workers] == [2, 3]
    elastic = plan(HOST, f"{TWO} --nnodes 2 --rdzv-backend c10d --rdzv-endpoint a")
    assert [worker.rank for worker in elastic.workers] == [None, None]


def test_the_route_to_the_endpoint_selects_the_network_interface() -> None:
    from cpulaunch.plan.planner import make_plan

    request = replace(
        request_of(f"{TWO} --nnodes 2 --master-addr a"), endpoint_interface="eth7", endpoint_address="10.0.0.7"
    )
    made = make_plan(HOST, request)
    assert (environ_of(made)["GLOO_SOCKET_IFNAME"], environ_of(made)["TP_SOCKET_IFNAME"]) == ("eth7", "eth7")
    assert made.job is not None
    assert made.job.local_addr == "10.0.0.7"


@pytest.mark.parametrize(
    ("flags", "redirects", "tee"),
    [
        (TWO, (0, 0), (0, 0)),
        (f"{TWO} --log-dir d", (0, 0), (3, 3)),
        (f"{TWO} --log-dir d --redirects 1", (1, 1), (0, 0)),
        (f"{TWO} --tee 1:2", (0, 0), (0, 2)),
        (f"{TWO} --redirects 0:1,1:3", (1, 3), (0, 0)),
    ],
)
def test_streams_by_local_rank(flags: str, redirects: tuple[int, ...], tee: tuple[int, ...]) -> None:
    streams = job(flags).streams
    assert (streams.redirects, streams.tee) == (redirects, tee)


@pytest.mark.parametrize(
    ("flags", "environ", "seconds"),
    [
        (TWO, {}, 30.0),
        (f"{TWO} --grace 5", {}, 5.0),
        (f"{TWO} --shutdown-timeout 4", {}, 4.0),
        (TWO, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 7.0),
        (TWO, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9" * 5000}, MAX_SECONDS),
        (f"{TWO} --grace 5", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 5.0),
        ("", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 30.0),
    ],
)
def test_the_grace_of_a_job(flags: str, environ: dict[str, str], seconds: float) -> None:
    assert plan(HOST, flags, environ=environ).launch.grace_seconds == seconds


def test_ranks_share_a_quota_equally() -> None:
    made = plan(quota(cpuset(HOST, "0-3"), 3.0), TWO)
    assert [len(worker.cpus) for worker in made.workers] == [2, 2]
    assert [worker.threads for worker in made.workers] == [1, 1]


def test_ranks_that_share_a_numa_node_pin_no_threads_and_do_not_spin() -> None:
    environ = environ_of(plan(HOST, "--nproc-per-node 4 --numa-binding node --affinity explicit --wait-policy active"))
    assert not {"OMP_PLACES", "KMP_AFFINITY"} & environ.keys()
    assert environ.get("OMP_WAIT_POLICY") != "ACTIVE"


def test_a_filter_selects_the_ranks_that_are_shown() -> None:
    assert plan(HOST, f"{TWO} --local-ranks-filter 1").launch.show == frozenset((1,))


@pytest.mark.parametrize(
    ("program", "flags", "expected"),
    [
        (SCRIPT, "--standalone", "/venv/bin/python -u infer.py"),
        (replace(SCRIPT, kind="module", target="pkg"), "--standalone", "/venv/bin/python -u -m pkg"),
        (Program(kind="command", target="./run", args=("${local_rank}", "$HOME")), TWO, "./run 1 $HOME"),
    ],
)
def test_command_line_of_a_rank(program: Program, flags: str, expected: str) -> None:
    assert " ".join(plan(HOST, flags, program=program).workers[-1].argv) == expected


def test_a_script_run_by_path_gets_its_own_arguments() -> None:
    (worker,) = plan(HOST, "--run-path", program=replace(SCRIPT, args=("--x", "1"))).workers
    assert worker.argv[:3] == ("/venv/bin/python", "-u", "-c")
    assert worker.argv[4:] == ("infer.py", "--x", "1")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (f"{TWO} --instances 2", ["--instances", "ranks (one job)"]),
        (f"{TWO} --cores-per-instance 2", ["--cores-per-instance"]),
        (f"{TWO} --instance-index 0", ["--instance-index"]),
        (f"{TWO} --env RANK=3", ["RANK", "--env"]),
        (f"{TWO} --env MASTER_PORT=3", ["MASTER_PORT", "--master-port"]),
        (f"{TWO} --env TORCHELASTIC_RUN_ID=3", ["TORCHELASTIC_RUN_ID"]),
        ("--nnodes 2 --node-rank 2", ["no such host", "--node-rank 2", "0 to 1"]),
        ("--node-rank 1", ["no such host", "--node-rank needs --nnodes 2"]),
        ("--nnodes 1:2", ["fixed number of hosts: --nnodes 1:2", "c10d"]),
        ("--nnodes 2 --standalone", ["--standalone starts one host only: --nnodes 2 ("]),
        ("--rdzv-endpoint a", ["needs a port", "a"]),
        ("--rdzv-endpoint a:99999", ["port", "99999"]),
        ("--rdzv-backend c10d --rdzv-endpoint a:x", ["port", "x"]),
        (f"{TWO} --redirects 2:1", ["no such local rank: --redirects 2", "0 to 1"]),
        ("--nproc-per-node 1 --tee 1:1", ["no such local rank: --tee 1", "local rank 0 only"]),
        (f"{TWO} --tee 0:1,5:1", ["no such local rank: --tee 5"]),
        (f"{TWO} --local-ranks-filter 0-3", ["no such local rank: --local-ranks-filter 2-3"]),
        (f"{TWO} --local-ranks-filter 0 --show 1", ["--show and --local-ranks-filter"]),
        (f"{TWO} --show 2", ["no such worker: 2", "--show"]),
        (f"{TWO} --signals-to-handle SIGTERM,SIGFOO", ["SIGFOO"]),
        (f"{TWO} --signals-to-handle SIGKILL", ["SIGKILL"]),
        (f"{TWO} --signals-to-handle SIGRTMIN+1", ["SIGRTMIN+1"]),
        (f"{TWO} --shutdown-timeout 3 --grace 4", ["--grace", "--shutdown-timeout 3"]),
        ("--nnodes 2 --master-addr a --report r.json", ["--report", "several hosts"]),
        ("--nnodes 2 --master-addr a --start-barrier", ["--start-barrier"]),
        ("--nproc-per-node 9 --numa-binding exclusive", ["5 ranks on the 4 cores of NUMA node 0", "node"]),
        ("--nproc-per-node gpu", ["GPU"]),
        ("--nproc-per-node xpu", ["GPU"]),
    ],
)
def test_contradictions_and_absent_parts_are_errors_with_values_and_a_hint(flags: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        plan(HOST, flags)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.hint
    assert str(caught.value).count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (f"{TWO} --rdzv-backend c10d --master-port 5", "--master-port is not used"),
        (f"{TWO} --rdzv-backend c10d --node-rank 5", "--node-rank is not used"),
        ("--nnodes 2", "no --master-addr"),
        ("--nnodes 2 --rdzv-backend c10d", "no --rdzv-endpoint"),
        ("--nnodes 1:2 --standalone", "--nnodes is not used"),
        ("--nproc-per-node 9", "9 ranks on 8 cores"),
        ("--nproc-per-node 4 --numa-binding node --affinity close", "--affinity close is not applied"),
    ],
)
def test_options_without_effect_are_warned_of(flags: str, part: str) -> None:
    assert any(part in warning for warning in plan(HOST, flags).warnings)


@pytest.mark.parametrize("flags", [TWO, "--standalone", "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint a:1"])
def test_an_ordinary_job_warns_of_nothing(flags: str) -> None:
    assert plan(HOST, flags).warnings == ()


def test_notes_name_the_engine_and_the_rendezvous() -> None:
    notes = {note.setting: note for note in plan(HOST, f"{TWO} --master-port 77").notes}
    assert notes["nproc_per_node"].value == "2"
    assert notes["engine"].value == "native"
    assert "one host" in notes["engine"].reason
    assert (notes["rendezvous"].value, notes["rendezvous"].origin) == ("127.0.0.1, port 77", "cli")


def test_notes_report_job_options_without_a_job() -> None:
    notes = {note.setting: note for note in plan(HOST, "--device cpu").notes}
    assert "no effect" in notes["device"].reason
