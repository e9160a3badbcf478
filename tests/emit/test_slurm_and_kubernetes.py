"""`--emit slurm|k8s`: the script and the manifest request the plan's resources and start the user's own command."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from cpulaunch.cli.arguments import parse_command_line
from cpulaunch.cli.run import read_command_line
from cpulaunch.emit.kubernetes import IMAGE, k8s_manifest
from cpulaunch.emit.resources import job_name
from cpulaunch.emit.slurm import slurm_script
from cpulaunch.plan.planner import make_plan
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.request import Layer, Program, merge
from cpulaunch.records.settings import setting_specs
from tests.plan.machines import cpuset, machine, quota, replace
from tests.schedulers.live import slurm

SMT = machine(sockets=2, cores=4, smt=2)
PLAIN = machine(sockets=2, cores=4)
GIB = 1 << 30


def limited(host: Host, memory_bytes: int) -> Host:
    """The host with a cgroup's limit of memory, for all of its CPUs."""
    return replace(host, limits=replace(host.limits, memory_bytes=memory_bytes))


def emitted(form: str, typed: str, host: Host = SMT) -> str:
    line = parse_command_line(shlex.split(typed), interpreter="/venv/bin/python")
    request = merge([Layer(origin="cli", values=line.values)], program=line.program, profile=None, environ={})
    emit = {"slurm": slurm_script, "k8s": k8s_manifest}[form]
    return emit(make_plan(host, request), host, line)


def directives(script: str) -> dict[str, str]:
    """The #SBATCH options by name."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return dict(line.partition("=")[::2] for line in lines)


def command(script: str) -> list[str]:
    """The words of the script's one command."""
    return shlex.split(script.rpartition("\n\n")[2].replace("\\\n", " "))


@pytest.mark.parametrize(
    ("case", "typed", "host", "expected"),
    [
        ("one CPU per core", "--nproc-per-node numa", SMT, {"cpus-per-task": "8", "hint": "nomultithread", "mem": "0"}),
        ("siblings too", "--nproc-per-node 2 --smt", SMT, {"cpus-per-task": "16", "hint": None, "mem": "0"}),
        ("no siblings", "--nproc-per-node 2", PLAIN, {"cpus-per-task": "8", "hint": None, "nodes": "1"}),
        ("a quarter of it", "--nproc-per-node 2 --cpus 0-1", PLAIN, {"cpus-per-task": "2", "mem": f"{64 * 1024}M"}),
        ("hosts", "--nnodes 4 --master-addr a", PLAIN, {"nodes": "4", "ntasks-per-node": "1"}),
        ("elastic", "--nnodes 2:4 --rdzv-backend c10d", PLAIN, {"nodes": "2-4"}),
        ("instances", "--instances 2", PLAIN, {"nodes": "1", "ntasks-per-node": "1", "cpus-per-task": "8"}),
        ("a cpuset", "--instances 1", cpuset(PLAIN, "0-3"), {"cpus-per-task": "4", "mem": f"{128 * 1024}M"}),
        ("less memory", "--instances 1", limited(PLAIN, 16 * GIB), {"cpus-per-task": "8", "mem": f"{16 * 1024}M"}),
        ("a quota", "--instances 1", quota(PLAIN, 2.5), {"cpus-per-task": "3", "hint": None}),
        ("its grace", "--grace 90 --instances 2", PLAIN, {"signal": "TERM@100"}),
    ],
)
def test_sbatch_directives_request_the_resources_of_the_plan(case, typed, host, expected):
    found = directives(emitted("slurm", f"{typed} train.py", host))
    assert {name: found.get(name) for name in expected} == expected, case


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--nproc-per-node numa train.py --lr 1", "--nproc-per-node numa train.py --lr 1"),
        ("--nnodes 4 --master-addr a --node-rank 1 train.py", "--nproc-per-node 1 train.py"),
        ("--nnodes 2:4 --rdzv-backend c10d t.py", "--nnodes 2:4 --rdzv-backend c10d t.py"),
        ("--instances 2 --cpus 0-3 --no-smt -m pkg.mod 'a b'", "--instances 2 --no-smt -m pkg.mod 'a b'"),
        ("--instances 2 --env 'A=b c' --env B=$X t.py", "--instances 2 --env 'A=b c' --env 'B=$X' t.py"),
        ("--nproc-per-node 2 --no-python -- ./run -x", "--nproc-per-node 2 --no-python ./run -x"),
    ],
)
def test_srun_starts_the_users_own_command(typed, words):
    found = command(emitted("slurm", typed))
    assert found[: found.index("cpulaunch")] == [
        "srun",
        "--cpus-per-task=" + directives(emitted("slurm", typed))["cpus-per-task"],
        "--kill-on-bad-exit=1",
    ]
    assert found[found.index("cpulaunch") + 1 :] == shlex.split(words)


def test_a_comment_names_the_options_left_to_slurm():
    assert "# Left to Slurm: --cpus, --master-addr." in emitted(
        "slurm", "--nnodes 2 --master-addr a --cpus 0-3 --nproc-per-node 2 train.py"
    )


@pytest.mark.parametrize("name", [name for name in setting_specs() if name not in ("profile",)])
def test_every_setting_is_parsed_as_it_was_written(name):
    spec = setting_specs()[name]
    value = spec.default
    if spec.value_type.metavar in SAMPLES:
        value = spec.value_type.from_text(SAMPLES[spec.value_type.metavar])
    elif not isinstance(value, bool | int | float | str):
        value = spec.value_type.from_text(spec.value_type.choices[-1] if spec.value_type.choices else "3")
    line = parse_command_line([*spec.arguments(value), "train.py"], interpreter="python")
    assert line.values == {name: value}


SAMPLES = {
    "LIST": "0-3,8",
    "TEXT": "a:b",
    "TEXT,...": "a,b",
    "N|MIN:MAX": "1:4",
    "K=V,...": "a=b,c=1",
    "N|RANK:N,...": "0:3,1:1",
    "K=V": "A=b=c",
    "FILE": "x/y",
    "DIR": "x/y",
    "REGEX": "(a)",
    "PORT": "4000",
}


# Kubernetes


def manifest(typed: str, host: Host = SMT) -> dict[str, Any]:
    loaded = yaml.safe_load(emitted("k8s", typed, host))
    assert isinstance(loaded, dict)
    return loaded


def pods(loaded: dict[str, Any]) -> dict[str, Any]:
    return loaded["spec"]["pytorchReplicaSpecs"]


def test_a_job_of_ranks_is_a_pytorchjob():
    made = manifest("--nproc-per-node 2 --nnodes 3 --master-addr a --node-rank 0 train.py --lr 1", PLAIN)
    assert (made["apiVersion"], made["kind"], made["metadata"]) == (
        "kubeflow.org/v1",
        "PyTorchJob",
        {"name": "train"},
    )
    assert made["spec"]["nprocPerNode"] == "2"
    assert {name: spec["replicas"] for name, spec in pods(made).items()} == {"Master": 1, "Worker": 2}
    for spec in pods(made).values():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert (container["name"], container["image"]) == ("pytorch", IMAGE)
        assert container["command"] == ["cpulaunch", "train.py", "--lr", "1"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"] == {"cpu": "8", "memory": f"{int(256 * 1024 * 0.9)}Mi"}
        assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
        assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        assert pod["terminationGracePeriodSeconds"] == 35


def test_variables_of_the_operator_make_the_same_job():
    """Source: training operator 1.9, pkg/controller.v1/pytorch/envvar.go."""
    made = manifest("--nproc-per-node 2 --nnodes 3 --master-addr a train.py")
    replicas = [("Master", 0), ("Worker", 0), ("Worker", 1)]
    for rank, (kind, _) in enumerate(replicas):
        (container,) = pods(made)[kind]["template"]["spec"]["containers"]
        environ = {
            "PET_NNODES": str(sum(spec["replicas"] for spec in pods(made).values())),
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": made["spec"]["nprocPerNode"],
            "PET_MASTER_ADDR": "train-master-0",
            "PET_MASTER_PORT": "23456",
            "RANK": str(rank),
        }
        line = read_command_line(container["command"][1:], environ)
        layers = [Layer(origin="cli", values=line.values), *line.layers]
        plan = make_plan(SMT, merge(layers, program=line.program, profile=None, environ=environ))
        assert [worker.rank for worker in plan.workers] == [2 * rank, 2 * rank + 1]
        assert plan.job is not None
        assert (plan.job.hosts, plan.job.rendezvous.endpoint) == ((3, 3), "train-master-0:23456")


def test_one_host_has_no_workers():
    assert list(pods(manifest("--nproc-per-node 2 train.py"))) == ["Master"]


def test_an_elastic_job_has_an_elastic_policy():
    made = manifest("--nnodes 1:4 --rdzv-backend c10d --rdzv-conf join_timeout=60 --max-restarts 3 train.py")
    (container,) = pods(made)["Worker"]["template"]["spec"]["containers"]
    assert container["command"] == ["cpulaunch", "--rdzv-conf", "join_timeout=60", "train.py"]
    assert made["spec"]["nprocPerNode"] == "1"
    assert made["spec"]["elasticPolicy"] == {
        "rdzvBackend": "c10d",
        "minReplicas": 1,
        "maxReplicas": 4,
        "maxRestarts": 3,
    }
    assert {name: spec["replicas"] for name, spec in pods(made).items()} == {"Worker": 4}


def test_ranks_by_numa_node_are_counted_in_the_pod():
    made = manifest("--nproc-per-node numa train.py")
    assert "nprocPerNode" not in made["spec"]
    assert pods(made)["Master"]["template"]["spec"]["containers"][0]["command"][1:3] == ["--nproc-per-node", "numa"]


def test_whole_cores_are_requested():
    text = emitted("k8s", "--nproc-per-node 2 --cpus 0-1 train.py")
    assert "the plan's 2 CPUs with SMT siblings, 4 in all" in text
    assert "# Left to Kubernetes: --cpus." in text
    container = pods(yaml.safe_load(text))["Master"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": f"{int(64 * 1024 * 0.9)}Mi"}


def test_instances_are_a_plain_job():
    made = manifest("--instances 2 --env 'A=\"b: #c' serve.py", PLAIN)
    assert (made["apiVersion"], made["kind"]) == ("batch/v1", "Job")
    pod = made["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["command"] == ["cpulaunch", "--instances", "2", "--env", 'A="b: #c', "serve.py"]
    assert pod["containers"][0]["resources"]["limits"]["cpu"] == "8"


ODD = ("a b", "it's", 'a "b"', "a\nb: c", "#SBATCH --x", "- x", "\U0001f600 \u00e9\x7f", "back\\slash", "")


@pytest.mark.parametrize("word", [*ODD, "$X", "$(X)", "$$(X)"])
def test_arguments_arrive_as_they_were_typed(word):
    typed = f"--nproc-per-node 2 train.py {shlex.quote(word)}"
    assert command(emitted("slurm", typed))[-1] == word
    (container,) = pods(manifest(typed))["Master"]["template"]["spec"]["containers"]
    assert expanded(container["command"][-1]) == word


def expanded(word: str) -> str:
    """What Kubernetes makes of a word where the variable X is "wrong". Source: Kubernetes, "Container", command."""
    return re.sub(r"\$(\$|\(X\))?", lambda found: "wrong" if found[1] == "(X)" else "$", word)


def test_an_argument_that_is_not_unicode():
    typed = "--nproc-per-node 2 train.py \udcff"
    assert command(emitted("slurm", typed))[-1] == "\udcff"
    with pytest.raises(UsageError, match="cannot write the argument to a manifest"):
        emitted("k8s", typed)


@pytest.mark.parametrize("form", ["slurm", "k8s"])
def test_without_a_program(form):
    with pytest.raises(UsageError, match="no program to start"):
        emitted(form, "--instances 2")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("a/Train_it.py", "train-it"),
        ("pkg.mod", "pkg-mod"),
        ("…", "cpulaunch"),
        ("x" * 99, "x" * 50),
        ("-a-", "a"),
        ("7b.py", "job-7b"),
    ],
)
def test_job_names_are_valid_in_kubernetes(target, name):
    assert job_name(Program(kind="script", target=target)) == name


# A real Slurm takes the script


@pytest.mark.root
def test_sbatch_accepts_the_scripts_and_runs_one(tmp_path: Path) -> None:
    done = slurm(
        """
        set -e
        cpulaunch plan --emit slurm --cpus 0-1 --nproc-per-node 2 --nnodes 2 --master-addr n1 $TELL >ranks.sh
        cpulaunch plan --emit slurm --cpus 0-1 --nnodes 1:2 --rdzv-backend c10d $TELL >elastic.sh
        cpulaunch plan --emit slurm --cpus 0-1 --instances 2 --grace 3 $TELL >instances.sh
        for script in ranks elastic instances; do sbatch --test-only $script.sh; done
        mkfifo ended
        cat >>instances.sh <<'END'
echo $? >ended
END
        sbatch --quiet --output=out.txt instances.sh
        read code <ended
        exit $code
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("to start at") == 3, done.stderr
    text = (tmp_path / "out.txt").read_text()
    found = {line.partition(" ")[0]: json.loads(line.partition(" ")[2]) for line in text.splitlines()}
    assert {label: (one["RANK"], one["cpus"]) for label, one in found.items()} == {
        "[0]": (None, [0]),
        "[1]": (None, [1]),
    }
