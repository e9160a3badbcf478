"""What distinguishes instances: variables, and words in arguments and --env values."""

import pytest

from cpulaunch.cli.arguments import parse_command_line
from cpulaunch.cli.run import request_for
from cpulaunch.plan.instance_identity import Instance
from cpulaunch.plan.planner import make_plan
from cpulaunch.records.errors import UsageError
from tests.roots import RootSpec, host_of

SECOND = Instance(index=1, count=4, cpus=frozenset({4, 5, 6, 7, 20}))


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("plain", "plain"),
        ("{instance}", "1"),
        ("shard-{instance}-of-{instances}.bin", "shard-1-of-4.bin"),
        ("--port={port:8000}", "--port=8001"),
        ("{cpus}", "4-7,20"),
        ("{{instance}}", "{instance}"),
        ("{{port:8000}} {instance}", "{port:8000} 1"),
        ("{{{instance}}}", "{{instance}}"),
        ('{"instance": 1}', '{"instance": 1}'),
        ("{other} {} {{}} {{ x }} { instance }", "{other} {} {{}} {{ x }} { instance }"),
        ("{port:} {port:x} {port:-1}", "{port:} {port:x} {port:-1}"),
        ("{instance", "{instance"),
        ("{{instance}", "{1"),
        ("{", "{"),
    ],
)
def test_words_of_an_instance(text, expanded):
    assert SECOND.expand(text) == expanded


def test_a_port_that_does_not_exist_is_an_error():
    assert SECOND.expand("{port:65534}") == "65535"
    with pytest.raises(UsageError, match="no such port: 65536"):
        SECOND.expand("{port:65535}")
    with pytest.raises(UsageError, match="no such port: 100000000000000000000 ") as error:
        SECOND.expand(f"{{port:{'9' * 5000}}}")
    assert len(str(error.value)) < 200


def plan(*words: str, environ=None):
    line = parse_command_line(words, interpreter="python")
    host = host_of(RootSpec(sockets=2, cores_per_l3=4))
    return make_plan(host, request_for(line, host, environ or {}))


def test_every_instance_knows_which_it_is():
    made = plan("--instances", "2", "--env", "CACHE=/tmp/{instance}", "a.py", "--port", "{port:8000}", "{cpus}")
    for index, worker in enumerate(made.workers):
        environ = dict(worker.env)
        assert (environ["CPULAUNCH_INSTANCE"], environ["CPULAUNCH_INSTANCES"]) == (str(index), "2")
        assert environ["CACHE"] == f"/tmp/{index}"
        assert worker.argv[-3:] == ("--port", str(8000 + index), ("0-3", "4-7")[index])
    notes = {note.setting: note.value for note in made.notes}
    assert notes["CPULAUNCH_INSTANCE"] == "0, 1"
    assert notes["CACHE"] == "/tmp/0, /tmp/1"


def test_instances_that_are_started_alone_keep_their_numbers():
    made = plan("--instances", "4", "--instance-index", "2", "a.py", "{instance}/{instances}")
    assert [worker.argv[-1] for worker in made.workers] == ["2/4"]
    assert dict(made.workers[0].env)["CPULAUNCH_INSTANCE"] == "2"


def test_an_outer_instance_gives_way():
    made = plan("--instances", "1", "a.py", environ={"CPULAUNCH_INSTANCE": "7", "CPULAUNCH_INSTANCES": "9"})
    assert dict(made.workers[0].env)["CPULAUNCH_INSTANCE"] == "0"
    assert dict(made.workers[0].env)["CPULAUNCH_INSTANCES"] == "1"


@pytest.mark.parametrize("options", [(), ("--nproc-per-node", "2")])
def test_other_launches_pass_words_as_they_are_written(options):
    made = plan(*options, "--env", "A={instance}", "a.py", "{instance}")
    for worker in made.workers:
        assert worker.argv[-1] == "{instance}"
        assert dict(worker.env)["A"] == "{instance}"
        assert "CPULAUNCH_INSTANCE" not in dict(worker.env)


def test_the_numbers_cannot_be_set():
    with pytest.raises(UsageError, match="cpulaunch itself sets CPULAUNCH_INSTANCE"):
        plan("--instances", "2", "--env", "CPULAUNCH_INSTANCE=3", "a.py")
