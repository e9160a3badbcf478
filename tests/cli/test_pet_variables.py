"""torchrun's variables and its command line: tables of arguments and environment against what is asked for."""

import pytest

from cpulaunch.cli.run import read_command_line, request_for
from cpulaunch.plan.planner import make_plan
from cpulaunch.records.errors import UsageError
from cpulaunch.records.request import LaunchRequest
from tests.plan.machines import machine

HOST = machine(sockets=2, cores=4)


def request(words: str, environ: dict[str, str] | None = None, *, torchrun: bool = False) -> LaunchRequest:
    """The request of a command line in an environment without profiles."""
    environ = {"PYTHON_EXEC": "/py", **(environ or {})}
    return request_for(read_command_line(words.split(), environ, torchrun=torchrun), HOST, environ)


TABLE = [
    ("PET_NNODES", "2", "nnodes", (2, 2)),
    ("PET_NNODES", "1:4", "nnodes", (1, 4)),
    ("PET_NPROC_PER_NODE", "4", "nproc_per_node", 4),
    ("PET_NPROC_PER_NODE", "auto", "nproc_per_node", "auto"),
    ("PET_NODE_RANK", "1", "node_rank", 1),
    ("PET_MASTER_ADDR", "job-master-0", "master_addr", "job-master-0"),
    ("PET_MASTER_PORT", "23456", "master_port", 23456),
    ("PET_MASTER_PORT", " 023456\n", "master_port", 23456),  # As torchrun's int() reads it.
    ("PET_STANDALONE", "1", "standalone", True),
    ("PET_RDZV_BACKEND", "c10d", "rdzv_backend", "c10d"),
    ("PET_RDZV_ENDPOINT", "a:1", "rdzv_endpoint", "a:1"),
    ("PET_RDZV_ID", "7", "rdzv_id", "7"),
    ("PET_RDZV_CONF", "join_timeout=60,is_host=1", "rdzv_conf", (("join_timeout", "60"), ("is_host", "1"))),
    ("PET_LOCAL_ADDR", "10.0.0.1", "local_addr", "10.0.0.1"),
    ("PET_MAX_RESTARTS", "3", "max_restarts", 3),
    ("PET_MONITOR_INTERVAL", "0.5", "monitor_interval", 0.5),
    ("PET_START_METHOD", "fork", "start_method", "fork"),
    ("PET_EVENT_LOG_HANDLER", "console", "event_log_handler", "console"),
    ("PET_ROLE", "trainer", "role", "trainer"),
    ("PET_RUN_PATH", "1", "run_path", True),
    ("PET_REDIRECTS", "0:3,1:1", "redirects", ((0, 3), (1, 1))),
    ("PET_TEE", "3", "tee", 3),
    ("PET_LOG_LINE_PREFIX_TEMPLATE", "$rank: ", "log_line_prefix_template", "$rank: "),
    ("PET_LOCAL_RANKS_FILTER", "0,2", "local_ranks_filter", frozenset((0, 2))),
    ("PET_DUPLICATE_STDOUT_FILTERS", "a,b,,c", "duplicate_stdout_filters", ("a", "b,c")),
    ("PET_DUPLICATE_STDERR_FILTERS", "a", "duplicate_stderr_filters", ("a",)),
    ("PET_NUMA_BINDING", "node", "numa_binding", "node"),
    ("PET_VIRTUAL_LOCAL_RANK", "1", "virtual_local_rank", True),
    ("PET_SIGNALS_TO_HANDLE", "SIGTERM, SIGUSR1", "signals_to_handle", ("SIGTERM", "SIGUSR1")),
    ("PET_SHUTDOWN_TIMEOUT", "5", "shutdown_timeout", 5),
]


@pytest.mark.parametrize(("variable", "text", "name", "value"), TABLE)
def test_every_variable_is_its_option(variable: str, text: str, name: str, value: object) -> None:
    asked = request("x.py", {variable: text})
    assert asked.distributed
    assert getattr(asked.settings, name) == value
    assert asked.origin(name) == "environment"


@pytest.mark.parametrize("variable", ["PET_LOG_DIR", "PET_MODULE", "PET_NO_PYTHON"])
def test_some_variables_apply_to_jobs_only(variable: str) -> None:
    alone = request("x.py", {variable: "1"})
    assert (alone.distributed, alone.settings.log_dir) == (False, None)
    assert alone.program is not None
    assert alone.program.kind == "script"


def test_the_log_directory_applies_to_a_job() -> None:
    assert request("--standalone x.py", {"PET_LOG_DIR": "logs"}).settings.log_dir == "logs"


@pytest.mark.parametrize("environ", [{"PET_STANDALONE": "0"}, {"PET_NNODES": ""}, {"PET_UNKNOWN": "1"}])
def test_empty_variables_and_disabled_switches_make_no_job(environ: dict[str, str]) -> None:
    assert not request("x.py", environ).distributed


@pytest.mark.parametrize(
    ("words", "environ", "kind", "interpreter"),
    [
        ("--standalone x", {}, "script", "/py"),
        ("--standalone x", {"PET_MODULE": "1"}, "module", "/py"),
        ("--standalone x", {"PET_NO_PYTHON": "1"}, "command", ""),
        ("--standalone x", {"PET_MODULE": "0"}, "script", "/py"),
        ("--standalone -m x", {"PET_NO_PYTHON": "1"}, "module", "/py"),
        ("--standalone --no-python x", {"PET_MODULE": "1"}, "command", ""),
        ("--standalone --no-python --run-path x", {}, "script", "/py"),
        ("--standalone --no-python x", {"PET_RUN_PATH": "1"}, "script", "/py"),
        ("--standalone x", {"PET_RUN_PATH": "1", "PET_NO_PYTHON": "1"}, "script", "/py"),
    ],
)
def test_the_kind_of_the_program(words: str, environ: dict[str, str], kind: str, interpreter: str) -> None:
    program = request(words, environ).program
    assert program is not None
    assert (program.kind, program.interpreter) == (kind, interpreter)


def test_a_flag_overrides_its_variable_with_one_notice() -> None:
    asked = request("--nnodes 1 --role=a x.py", {"PET_NNODES": "2", "PET_ROLE": "b", "PET_MAX_RESTARTS": "1"})
    assert (asked.settings.nnodes, asked.settings.role, asked.settings.max_restarts) == ((1, 1), "a", 1)
    (notice,) = asked.notices
    assert notice == "--nnodes, --role on the command line override PET_NNODES=2, PET_ROLE=b from the environment"
    assert asked.reasons["nnodes"] == "overrides PET_NNODES=2"
    assert asked.warnings == ()


def test_a_flag_equal_to_its_variable_gives_no_notice() -> None:
    assert request("--nnodes 2 x.py", {"PET_NNODES": "2"}).notices == ()


def test_instances_override_variables_with_a_notice() -> None:
    asked = request("--instances 2 x.py", {"PET_NNODES": "2", "PET_NODE_RANK": "nonsense"})
    assert not asked.distributed
    (notice,) = asked.notices
    assert "PET_NNODES, PET_NODE_RANK" in notice


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"PET_NNODES": "x"}, ["PET_NNODES=x", "(environment)"]),
        ({"PET_NNODES": "3:1"}, ["PET_NNODES=3:1"]),
        ({"PET_NPROC_PER_NODE": "0"}, ["PET_NPROC_PER_NODE=0", "at least 1"]),
        ({"PET_STANDALONE": "yes"}, ["PET_STANDALONE=yes", "1 or 0"]),
        ({"PET_MASTER_PORT": "70000"}, ["PET_MASTER_PORT=70000", "65535"]),
        ({"PET_REDIRECTS": "9"}, ["PET_REDIRECTS=9"]),
        ({"PET_NNODES": "1", "PET_MODULE": "true"}, ["PET_MODULE=true"]),
        ({"PET_NNODES": "1", "PET_MODULE": "1", "PET_NO_PYTHON": "1"}, ["PET_MODULE and PET_NO_PYTHON"]),
    ],
)
def test_a_malformed_variable_is_an_error_that_names_it(environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        request("x.py", environ)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("x.py", "nproc_per_node", 1),
        ("--nproc_per_node=2 x.py", "nproc_per_node", 2),
        ("--nproc-per-node 2 x.py", "nproc_per_node", 2),
        ("--nproc 2 x.py", "nproc_per_node", 2),
        ("--nproc_p 2 x.py", "nproc_per_node", 2),
        ("--redir 1 x.py", "redirects", 1),
        ("--stand x.py", "standalone", True),
        ("-r 3 x.py", "redirects", 3),
        ("-r3 x.py", "redirects", 3),
        ("-t=1 x.py", "tee", 1),
        ("-t0:1,1:2 x.py", "tee", ((0, 1), (1, 2))),
        ("--log-d logs x.py", "log_dir", "logs"),
        ("--rdzv-endpoint= x.py", "rdzv_endpoint", None),
        ("--instances=2 x.py", "instances", 2),
    ],
)
def test_torchruns_command_line(words: str, name: str, value: object) -> None:
    asked = request(words, torchrun=True)
    assert asked.distributed
    assert getattr(asked.settings, name) == value


@pytest.mark.parametrize(
    ("words", "torchrun", "part"),
    [
        ("--no 2 x.py", True, "it may mean --node-rank, --no-python"),
        ("--r 2 x.py", True, "ambiguous option: --r"),
        ("--nprocs 2 x.py", False, "--nprocs 2 is --nproc-per-node 2"),
        ("--no-python -m x", True, "-m and --no-python"),
        ("--nproc-per-node 0 x.py", True, "at least 1"),
    ],
)
def test_invalid_options(words: str, torchrun: bool, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        request(words, torchrun=torchrun)
    assert part in str(caught.value)


def test_ranks_requested_by_a_variable() -> None:
    asked = request("x.py", {"PET_NPROC_PER_NODE": "3"}, torchrun=True)
    assert (asked.settings.nproc_per_node, asked.origin("nproc_per_node")) == (3, "environment")


KUBEFLOW = {"PET_NPROC_PER_NODE": "auto", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0"}
FIXED = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456"}
ELASTIC = {
    "PET_NNODES": "1:3",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "job-worker-0:29400",
    "PET_MAX_RESTARTS": "10",
}


@pytest.mark.parametrize(
    ("environ", "hosts", "backend", "endpoint"),
    [
        (FIXED, (2, 2), "static", "job-master-0:23456"),
        ({**ELASTIC, "PET_MASTER_PORT": "23456"}, (1, 3), "c10d", "job-worker-0:29400"),
    ],
)
def test_kubeflows_jobs_work_as_they_are(
    environ: dict[str, str], hosts: tuple[int, int], backend: str, endpoint: str
) -> None:
    made = make_plan(HOST, request("train.py", {**KUBEFLOW, **environ}))
    assert made.job is not None
    assert (made.job.hosts, made.job.local_world_size) == (hosts, 8)
    assert (made.job.rendezvous.backend, made.job.rendezvous.endpoint) == (backend, endpoint)
    assert made.warnings == ()
