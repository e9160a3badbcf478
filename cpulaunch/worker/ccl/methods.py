"""How methods of the process group turn their arguments into jobs, and leave to gloo what the backend does not do."""

from __future__ import annotations

from functools import wraps

import torch
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from cpulaunch.worker.ccl.argument_checks import check_writable
from cpulaunch.worker.ccl.delegate import mention
from cpulaunch.worker.ccl.wire.errors import UnsupportedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from torch import Tensor

SHOWN_AS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "_all_gather_base",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
}
"""Method -> the collective as the profiler shows it for torch's own backends, where the two differ."""


def options(kind: Any, opts: Any, **fields: Any) -> Any:
    """The options; new ones, with the fields that are not None, where a caller gives fields instead."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    return made


def listed(tensor: Any) -> Any:
    """A list of the tensor; a list as it is. torch's groups take both."""
    return [tensor] if isinstance(tensor, torch.Tensor) else tensor


def collective(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """A method that submits what `prepare` returns: a job and the options of the call.

    gloo runs what this backend does not support, and everything if the group has no path of its own.
    """
    name = prepare.__name__

    @wraps(prepare)
    def method(group: Any, *arguments: Any, **named: Any) -> Any:
        if group.uses_gloo:
            return getattr(group.gloo, name)(*arguments, **named)
        try:
            job, opts = prepare(group, *arguments, **named)
        except UnsupportedError as error:
            if group.rank() == 0:
                mention(f"gloo computes {error}, which ccl does not support")
            return getattr(group.gloo, name)(*arguments, **named)
        if not _profiler_enabled():
            return group.submit(job, opts)
        with record_function(f"ccl:{SHOWN_AS.get(name, name)}"):
            return group.submit(job, opts)

    _hide_from_dynamo(method)
    return method


def by_gloo(name: str) -> Callable[..., Any]:
    """The method of gloo's group of the same ranks."""
    return lambda group, *arguments, **named: getattr(group.gloo, name)(*arguments, **named)


def _hide_from_dynamo(function: Any) -> None:
    """Effect: a compiled program calls the function as it is, as it does the methods of torch's own groups."""
    function._torchdynamo_disable = True
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # Since torch 2.6.
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    else:
        frames.skip_code(function.__code__)


def call_of(
    result: Sequence[Tensor], function: Callable[..., None], *arguments: Any, **named: Any
) -> Callable[[], Any]:
    """A job that calls the function and returns its output tensors. Raises: ValueError if they cannot be written to."""
    check_writable(result)

    def job() -> Any:
        function(*arguments, **named)
        return result

    return job


def calls_of(result: Any, function: Callable[..., None], *columns: Sequence[Any]) -> Callable[[], Any]:
    """A job that calls the function for each row of the columns and returns `result`.

    The first column are the tensors, or lists of tensors, that are written. Raises: as call_of.
    """
    for written in columns[0]:
        check_writable([written] if isinstance(written, torch.Tensor) else written)

    def job() -> Any:
        for row in zip(*columns, strict=True):
            function(*row)
        return result

    return job
