"""`--emit k8s`: a manifest for Kubernetes: Kubeflow's PyTorchJob for ranks, a plain Job for anything else.

Source: Kubeflow training operator 1.9, pkg/controller.v1/pytorch (it sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR,
PET_MASTER_PORT, PET_NPROC_PER_NODE, "auto" if unsaid, or PET_RDZV_* with an elasticPolicy); Kubernetes, "Control CPU
Management Policies on the Node" (whole CPUs with requests equal to limits are exclusive ones).
"""

from json import dumps
from math import ceil
from typing import Any

from cpulaunch.emit.resources import (
    MEETING,
    THIS_HOST,
    Needs,
    asked_for,
    command_of,
    job_name,
    left_out,
    needs_of,
    program_of,
)
from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import JobPlan, LaunchPlan

IMAGE = "REPLACE-WITH-AN-IMAGE-THAT-HAS-TORCH-AND-CPULAUNCH"
OPERATORS = (*MEETING, "nnodes", "standalone", "rdzv_backend")
"""Settings that the operator says by its PET_ variables."""
GPU_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/xe"}
COUNTED = ("auto", "cpu", "gpu")
"""Words that nprocPerNode may be, beside a number."""
MEMORY_PART = 0.9
"""Of the plan's part of this host's memory: a node keeps some for itself."""
MARGIN_SECONDS = 5


def k8s_manifest(plan: LaunchPlan, host: Host, line: CommandLine) -> str:
    """The manifest in YAML. Raises: UsageError if the plan has no program."""
    program = program_of(line, "k8s")
    needs = needs_of(plan, host)
    name = job_name(program)
    dropped = _dropped(plan, line)
    container = {
        "name": name if plan.job is None else "pytorch",  # The operator looks for this name.
        "image": IMAGE,
        "command": [_literal(word) for word in command_of(line, program, without=dropped)],
        "resources": _resources(needs),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "terminationGracePeriodSeconds": ceil(plan.launch.grace_seconds) + MARGIN_SECONDS,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    manifest = _plain_job(name, pod) if plan.job is None else _pytorch_job(name, pod, plan.job, line)
    return "".join(f"# {text}\n" for text in _comments(needs, line, dropped)) + yaml_text(manifest)


def _literal(word: str) -> str:
    """A word of a command that Kubernetes hands on as it is. Raises: UsageError if no manifest can hold it.

    Source: Kubernetes, "Define Dependent Environment Variables": $(NAME) stands for a variable, $$ for one $.
    """
    if not word.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in word):
        raise UsageError(
            "a manifest holds text only",
            value=ascii(word),
            source="--emit k8s",
            hint="name files and arguments in UTF-8",
        )
    return word.replace("$", "$$")


def _dropped(plan: LaunchPlan, line: CommandLine) -> tuple[str, ...]:
    if plan.job is None:
        return THIS_HOST
    said = ("nproc_per_node",) if _nproc(line) is not None else ()
    restarts = ("max_restarts",) if _elastic(plan.job) else ()
    return (*THIS_HOST, *OPERATORS, *said, *restarts)


def _comments(needs: Needs, line: CommandLine, dropped: tuple[str, ...]) -> list[str]:
    cpus = f"{needs.cpus} CPUs"
    if needs.core_cpus > needs.cpus:
        cpus += f" and their SMT siblings, {needs.core_cpus} in all: Kubernetes hands out logical CPUs"
    lost = left_out(line, (name for name in dropped if name in (*THIS_HOST, *MEETING)))
    return [
        f"Written by cpulaunch. Requests equal limits, for CPUs of one's own: the plan's {cpus}.",
        "Put your image's name for the placeholder. Memory policies need the capability SYS_NICE in some clusters.",
        *([f"Left to Kubernetes: {', '.join(lost)}."] if lost else []),
    ]


def _resources(needs: Needs) -> dict[str, Any]:
    amounts: dict[str, Any] = {"cpu": str(needs.core_cpus)}
    if needs.memory_mib is not None:
        amounts["memory"] = f"{int(needs.memory_mib * MEMORY_PART)}Mi"
    if needs.gpus and needs.gpu_vendor in GPU_RESOURCES:
        amounts[GPU_RESOURCES[needs.gpu_vendor]] = str(needs.gpus)
    return {"requests": amounts, "limits": amounts}


def _plain_job(name: str, pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", **pod}}},
    }


def _pytorch_job(name: str, pod: dict[str, Any], job: JobPlan, line: CommandLine) -> dict[str, Any]:
    nproc = _nproc(line)
    spec: dict[str, Any] = {} if nproc is None else {"nprocPerNode": nproc}
    fewest, most = job.hosts
    template = {"spec": pod}
    if _elastic(job):
        spec["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "minReplicas": fewest,
            "maxReplicas": most,
            "maxRestarts": job.max_restarts,
        }
        replicas = {"Worker": {"replicas": most, "restartPolicy": "OnFailure", "template": template}}
    else:
        replicas = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}
        if most > 1:
            replicas["Worker"] = {"replicas": most - 1, "restartPolicy": "Never", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": spec | {"pytorchReplicaSpecs": replicas},
    }


def _elastic(job: JobPlan) -> bool:
    return job.hosts[0] < job.hosts[1]


def _nproc(line: CommandLine) -> str | None:
    """nprocPerNode, where it can say what was asked for."""
    asked = asked_for(line).get("nproc_per_node", 1)
    return str(asked) if isinstance(asked, int) or asked in COUNTED else None


def yaml_text(value: Any, indent: str = "") -> str:
    """Nested dictionaries and lists as YAML."""
    if isinstance(value, dict):
        return "".join(f"{indent}{key}:{_below(each, indent)}" for key, each in value.items())
    return "".join(f"{indent}- {_item(each, indent + '  ')}" for each in value)


def _item(value: Any, indent: str) -> str:
    return yaml_text(value, indent).lstrip() if isinstance(value, dict | list) else f"{_scalar(value)}\n"


def _below(value: Any, indent: str) -> str:
    """What follows a key: on its line, or below it."""
    if isinstance(value, dict | list) and value:
        return "\n" + yaml_text(value, indent + "  ")
    return f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    """As in JSON, which is YAML too, but for signs beyond 16 bits: JSON's two halves are none in YAML."""
    if not isinstance(value, str):
        return dumps(value)
    signs = (dumps(sign)[1:-1] if ord(sign) < 1 << 16 else f"\\U{ord(sign):08x}" for sign in value)
    return f'"{"".join(signs)}"'
