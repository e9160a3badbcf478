"""`--emit k8s`: a Kubernetes manifest, with Kubeflow's PyTorchJob for ranks and a plain Job for anything else.

Source: Kubeflow training operator 1.9, pkg/controller.v1/pytorch (it sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR,
PET_MASTER_PORT, PET_NPROC_PER_NODE, "auto" by default, or PET_RDZV_* with an elasticPolicy); Kubernetes, "Control CPU
Management Policies on the Node" (whole CPUs with requests equal to limits are exclusive ones).
"""

from collections.abc import Collection
from json import dumps
from math import ceil
from typing import Any

from cpulaunch.emit.resources import (
    HOST_SETTINGS,
    RENDEZVOUS_SETTINGS,
    ResourceRequest,
    chosen_flags,
    chosen_settings,
    cpulaunch_command,
    job_name,
    required_program,
    resources_of,
)
from cpulaunch.emit.shell_variables import is_identifier
from cpulaunch.records.command_line import CommandLine
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host, count_text
from cpulaunch.records.plan import JobPlan, LaunchPlan

IMAGE = "REPLACE-WITH-AN-IMAGE-THAT-HAS-TORCH-AND-CPULAUNCH"
OPERATOR_SETTINGS = (*RENDEZVOUS_SETTINGS, "nnodes", "standalone", "rdzv_backend")
"""Settings that the operator sets by its PET_ variables."""
GPU_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/xe"}
NPROC_WORDS = ("auto", "cpu", "gpu")
"""Words that nprocPerNode accepts besides numbers."""
MEMORY_PART = 0.9
"""The part of the plan's memory to request: a cluster node keeps some of its memory for itself."""
MARGIN_SECONDS = 5
"""Seconds from the end of cpulaunch's grace period to the end of the pod's."""


def k8s_manifest(plan: LaunchPlan, host: Host, command_line: CommandLine, *, hidden: Collection[str] = ()) -> str:
    """The manifest in YAML. Raises: UsageError if the plan has no program.

    `hidden`: variables that the containers get from a secret, without which Kubernetes does not start them.
    """
    program = required_program(command_line, "k8s")
    resources = resources_of(plan, host)
    name = job_name(program)
    nproc = _nproc(command_line)
    without = _settings_elsewhere(plan.job, nproc)
    command = cpulaunch_command(command_line, program, without=without)
    container = {
        "name": name if plan.job is None else "pytorch",  # The operator requires this name.
        "image": IMAGE,
        "command": [_literal(word) for word in command],
        **({"env": [_from_secret(variable, _secret(name)) for variable in sorted(hidden)]} if hidden else {}),
        "resources": _resources(resources),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "terminationGracePeriodSeconds": ceil(plan.launch.grace_seconds) + MARGIN_SECONDS,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    manifest = _plain_job(name, pod) if plan.job is None else _pytorch_job(name, pod, plan.job, nproc)
    unused = (*HOST_SETTINGS, *RENDEZVOUS_SETTINGS) if plan.job is not None else HOST_SETTINGS
    comments = [*_comments(resources, chosen_flags(command_line, unused)), *_secret_comments(_secret(name), hidden)]
    return "".join(f"# {text}\n" for text in comments) + yaml_text(manifest)


def _literal(word: str) -> str:
    """The word of a command such that Kubernetes expands nothing in it. Raises: UsageError if it is not valid Unicode.

    Source: Kubernetes, "Define Dependent Environment Variables": $(NAME) stands for a variable, $$ for one $.
    """
    if not word.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in word):
        raise UsageError(
            "cannot write the argument to a manifest, which is text",
            value=ascii(word),
            source="--emit k8s",
            hint="use UTF-8 in file names and arguments",
        )
    return word.replace("$", "$$")


def _secret(name: str) -> str:
    """The name of the secret with the job's hidden variables."""
    return f"{name}-env"


def _from_secret(variable: str, secret: str) -> dict[str, Any]:
    """Source: Kubernetes, "Distribute Credentials Securely Using Secrets"."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": variable}}}


def _secret_comments(secret: str, hidden: Collection[str]) -> list[str]:
    if not hidden:
        return []
    keys = " ".join(f'--from-literal={name}="${name}"' for name in sorted(hidden) if is_identifier(name))
    return [
        "Values of --env are not written here without --show-env. Create a secret that has them:",
        f"  kubectl create secret generic {secret} {keys}",
    ]


def _settings_elsewhere(job: JobPlan | None, nproc: str | None) -> tuple[str, ...]:
    """The settings that the command leaves out: the manifest has them, or they are for this host."""
    if job is None:
        return HOST_SETTINGS
    counted = ("nproc_per_node",) if nproc is not None else ()
    restarts = ("max_restarts",) if _elastic(job) else ()
    return (*HOST_SETTINGS, *OPERATOR_SETTINGS, *counted, *restarts)


def _comments(resources: ResourceRequest, flags: list[str]) -> list[str]:
    """The comments of the manifest. `flags`: options that it leaves out because Kubernetes decides them."""
    cpus = count_text(resources.cpus, "CPU")
    if resources.core_cpus > resources.cpus:
        cpus += f" with SMT siblings, {resources.core_cpus} in all: Kubernetes assigns logical CPUs"
    return [
        f"Written by cpulaunch. Requests equal limits, to get exclusive CPUs: the plan's {cpus}.",
        "Insert the name of your image. Memory policies need the capability SYS_NICE in some clusters.",
        *([f"Left to Kubernetes: {', '.join(flags)}."] if flags else []),
    ]


def _resources(resources: ResourceRequest) -> dict[str, Any]:
    amounts: dict[str, Any] = {"cpu": str(resources.core_cpus)}
    if resources.memory_mib is not None:
        amounts["memory"] = f"{int(resources.memory_mib * MEMORY_PART)}Mi"
    if resources.gpus and resources.gpu_vendor in GPU_RESOURCES:
        amounts[GPU_RESOURCES[resources.gpu_vendor]] = str(resources.gpus)
    return {"requests": amounts, "limits": amounts}


def _plain_job(name: str, pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", **pod}}},
    }


def _pytorch_job(name: str, pod: dict[str, Any], job: JobPlan, nproc: str | None) -> dict[str, Any]:
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


def _nproc(command_line: CommandLine) -> str | None:
    """The value of nprocPerNode; None if the operator does not know the word."""
    nproc = chosen_settings(command_line).get("nproc_per_node", 1)
    return str(nproc) if isinstance(nproc, int) or nproc in NPROC_WORDS else None


def yaml_text(value: Any, indent: str = "") -> str:
    """The nested dictionaries and lists as YAML."""
    if isinstance(value, dict):
        return "".join(f"{indent}{key}:{_below(each, indent)}" for key, each in value.items())
    return "".join(f"{indent}- {_item(each, indent + '  ')}" for each in value)


def _item(value: Any, indent: str) -> str:
    return yaml_text(value, indent).lstrip() if isinstance(value, dict | list) else f"{_scalar(value)}\n"


def _below(value: Any, indent: str) -> str:
    """The text after a key: on its line, or below it."""
    if isinstance(value, dict | list) and value:
        return "\n" + yaml_text(value, indent + "  ")
    return f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    """The scalar as in JSON, which is valid YAML except for JSON's surrogate pairs of characters beyond 16 bits."""
    if not isinstance(value, str):
        return dumps(value)
    signs = (dumps(sign)[1:-1] if ord(sign) < 1 << 16 else f"\\U{ord(sign):08x}" for sign in value)
    return f'"{"".join(signs)}"'
