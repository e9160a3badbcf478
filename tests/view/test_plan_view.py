"""A plan as JSON and as text."""

import json

import pytest

from cpulaunch.records.host import Host
from cpulaunch.records.record import replace
from cpulaunch.records.request import SchedulerRank
from cpulaunch.view.job_view import job_json
from cpulaunch.view.plan_view import plan_json, plan_text
from tests import json_output
from tests.plan.machines import libraries, machine, plan, quota

HOST = libraries(machine(sockets=2, cores=4, smt=2), "tcmalloc")


def text(host: Host, flags: str = "", *, width: int = 80, color: bool = False, **more: object) -> str:
    return plan_text(plan(host, flags, **more), host, width=width, color=color)


def test_json_is_the_contract() -> None:
    made = plan_json(plan(HOST, "--instances 2 --affinity none", environ={"KMP_AFFINITY": "compact"}, profile={}))
    assert json_output.read("plan", json.dumps(made)) == made
    assert list(made) == ["schema", "mode", "profile", "world_size", "workers", "notes", "warnings", "job"]
    assert (made["schema"], made["mode"], made["profile"], made["world_size"]) == (1, "instances", "p", 2)
    worker = made["workers"][1]
    assert worker == {
        "index": 1,
        "rank": None,
        "local_rank": None,
        "cpus": "4-7",
        "loader_cpus": "",
        "ccl_cpus": "",
        "numa_nodes": "1",
        "mempolicy": "preferred",
        "threads": 4,
        "gpu": None,
        "env": worker["env"],
        "argv": ["/venv/bin/python", "-u", "infer.py"],
    }
    assert worker["env"]["OMP_NUM_THREADS"] == "4"
    assert worker["env"]["LD_PRELOAD"] == "/usr/lib/libtcmalloc.so"
    assert worker["env"]["KMP_AFFINITY"] is None
    assert made["notes"][0] == {
        "setting": "instances",
        "value": "2",
        "origin": "cli",
        "reason": "2 instances on 8 cores",
    }
    assert made["warnings"] == []


def test_json_of_an_unbound_worker_has_empty_lists() -> None:
    (worker,) = plan_json(plan(HOST, "--binder none"))["workers"]
    assert (worker["cpus"], worker["numa_nodes"], worker["mempolicy"]) == ("", "", "none")


def test_text_names_every_worker_with_cpus_memory_and_threads() -> None:
    rows = text(HOST, "--instances 2").splitlines()
    assert rows[0] == "2 instances"
    assert "0       0-3   preferred 0  4" in rows
    assert "1       4-7   preferred 1  4" in rows
    assert "command: /venv/bin/python -u infer.py" in rows


def test_text_has_every_note_with_value_origin_and_reason() -> None:
    made = plan(HOST, "--threads 3", environ={"OMP_SCHEDULE": "DYNAMIC"}, profile={"reserve": 1})
    words = " ".join(plan_text(made, HOST, width=80, color=False).split())
    for note in made.notes:
        origin = "" if note.origin == "default" else f" [{note.origin}]"
        assert f"{note.setting} {note.value}{origin}" in words
        assert note.reason in words


def test_text_has_the_warnings() -> None:
    assert "warning: --wait-policy active is not applied" in text(quota(HOST, 2.0), "--wait-policy active")


def test_the_core_map_shows_the_owners() -> None:
    assert "w0" in text(HOST, "--instances 2")
    assert "w1" in text(HOST, "--instances 2")
    assert "w0" in text(HOST)


def test_shared_cpus_are_not_drawn_as_owned() -> None:
    assert "w0" not in text(quota(HOST, 2.0), "--instances 4")
    assert "w0" not in text(HOST, "--binder none")


def test_text_marks_workers_not_bound_not_started_and_not_listed() -> None:
    assert "not bound" in text(HOST, "--binder none")
    assert "first touch" in text(HOST, "--binder none")
    assert text(HOST, "--instances 4 --instance-index 1").startswith("4 instances, 1 started here")
    many = machine(cores=40)
    assert "… and 8 more" in text(many, "--instances 40")
    assert "(unset)" in text(HOST, "--affinity none", environ={"KMP_AFFINITY": "x"})


def test_text_without_a_program_has_no_command() -> None:
    assert "command:" not in text(HOST, program=None)


def test_lines_fit_the_width() -> None:
    for width in (60, 80, 120):
        rows = text(HOST, "--instances 2", width=width).splitlines()
        assert all(len(row) <= width for row in rows if "/usr/lib" not in row)


def test_colours_are_off_by_default() -> None:
    assert "\033[" not in text(HOST, "--instances 2")
    assert "\033[" in text(HOST, "--instances 2", color=True)


def test_json_of_a_job_has_its_ranks_and_the_job() -> None:
    made = plan_json(plan(HOST, "--nproc-per-node 2 --nnodes 2 --node-rank 1 --master-addr a --redirects 1:3"))
    assert json_output.read("plan", json.dumps(made)) == made
    assert (made["mode"], made["world_size"]) == ("ranks", 4)
    assert [(each["rank"], each["local_rank"], each["gpu"]) for each in made["workers"]] == [(2, 0, None), (3, 1, None)]
    job = made["job"]
    assert (job["engine"], job["hosts"], job["host_rank"]) == ("elastic", [2, 2], 1)
    assert job["rendezvous"] == {"backend": "static", "endpoint": "a:29500", "id": "none", "conf": []}
    assert job["streams"]["redirects"] == [0, 3]
    assert plan_json(plan(HOST))["job"] is None


def test_json_key_of_a_rank_that_a_scheduler_started_is_member() -> None:
    job = plan(HOST, "--nproc-per-node 2").job
    assert job is not None
    assert job_json(job)["member"] is None
    rank = SchedulerRank(rank=3, world_size=4, local_rank=1, local_world_size=2, host_rank=1)
    made = job_json(replace(job, engine="scheduler", scheduled_rank=rank))
    assert (made["engine"], made["member"]["rank"], made.keys()) == ("member", 3, job_json(job).keys())


@pytest.mark.parametrize(
    ("flags", "title", "row"),
    [
        ("--nproc-per-node 2", "2 ranks on one host", "1     4-7   preferred 1  4"),
        ("--standalone --cpus 0-3", "1 rank on one host", "0     0-3   preferred 0  4"),
        ("--nnodes 2 --node-rank 1 --master-addr a", "2 ranks on 2 hosts, 1 started here", "1     0-7"),
        ("--nnodes 1:2 --rdzv-backend c10d", "2 ranks on 1 to 2 hosts, 1 started here", "local rank 0  0-7"),
    ],
)
def test_text_of_a_job_names_its_ranks(flags: str, title: str, row: str) -> None:
    rows = text(HOST, flags).splitlines()
    assert rows[0] == title
    assert any(line.startswith(row) for line in rows)


def test_text_of_a_job_writes_settings_as_they_are_typed() -> None:
    flags = "--nproc-per-node 2 --nnodes 1:2 --rdzv-backend c10d --rdzv-conf a=1,b=2 --redirects 0:1,1:3"
    words = " ".join(text(HOST, f"{flags} --signals-to-handle SIGTERM,SIGUSR1 --local-ranks-filter 0-1").split())
    for shown in (
        "nnodes 1:2 [cli]",
        "a=1,b=2 [cli]",
        "0:1,1:3 [cli]",
        "SIGTERM,SIGUSR1 [cli]",
        "0-1 [cli]",
    ):
        assert shown in words


def test_text_shows_escape_sequences_of_variables_and_arguments_as_text() -> None:
    made = plan(HOST, "--env X=a\x1b]0;owned\x07b", environ={"OMP_NUM_THREADS": "\x1b[31m\udcff"})
    made = replace(made, workers=tuple(replace(each, argv=("python", "a\x1b[2J\udcff")) for each in made.workers))
    shown = plan_text(made, HOST, width=80, color=False)
    assert shown.replace("\n", "").isprintable()
    assert r"a\x1b]0;owned\x07b [cli]" in shown
    assert r"command: python 'a\x1b[2J\udcff'" in shown
    assert r"OMP_NUM_THREADS=\x1b[31m\udcff in your environment" in shown
