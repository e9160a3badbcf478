"""How methods of the process group turn their arguments into jobs, and leave to gloo what the backend does not do."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from cpulaunch.worker.ccl.group_setup import mention
from cpulaunch.worker.ccl.wire.errors import UnsupportedError

SHOWN_AS = {"allreduce": "all_reduce", "allgather": "all_gather", "_allgather_base": "_all_gather_base"}
SHOWN_AS |= dict.fromkeys(("alltoall", "alltoall_base"), "all_to_all")
"""Method -> the collective as the profiler shows it for torch's own backends, where the two differ."""
FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""An argument that torch's groups take instead of options -> the field of the options."""
_PLAIN = torch.Tensor.__torch_dispatch__
"""The __torch_dispatch__ of classes that hold their elements as a torch.Tensor does."""
_FUNCTIONAL = "torch.distributed._functional_collectives"

Prepare = Callable[..., tuple[Any, Callable[[], None]]]


def collective(kind: Any, *fields: str) -> Callable[[Prepare], Callable[..., Any]]:
    """A decorator for a method of a group: it submits what the method returns, a function and the lists that it writes.

    torch passes the tensors and options of a kind, with which the method is called. Programs may pass `fields` and the
    timeout instead. gloo runs what this backend does not support, and everything if the group has no path of its own.
    """

    def decorate(prepare: Prepare) -> Callable[..., Any]:
        name, count = prepare.__name__, prepare.__code__.co_argcount - 2

        @wraps(prepare)
        def method(group: Any, *arguments: Any, **named: Any) -> Any:
            if group.uses_gloo:
                return getattr(group.gloo, name)(*arguments, **named)
            try:
                opts, others = _options(kind, fields, arguments[count:], named)
                written, function = prepare(group, opts, *arguments[:count], **others)
            except UnsupportedError as error:
                if group.rank() == 0:
                    mention(f"gloo computes {error}, which ccl does not support")
                return getattr(group.gloo, name)(*arguments, **named)
            _check_writable(written)

            def job() -> Any:
                function()
                return written

            if not _profiler_enabled():
                return group.submit(job, opts)
            with record_function(f"ccl:{SHOWN_AS.get(name, name)}"):
                return group.submit(job, opts)

        _hide_from_dynamo(method)
        return method

    return decorate


def _options(
    kind: Any, fields: Sequence[str], rest: Sequence[Any], named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The options among the arguments, or new ones with the fields that the arguments hold; the other named ones."""
    opts = rest[0] if rest else named.get("opts")
    others = {name: value for name, value in named.items() if name != "opts"} if named else named
    if not isinstance(opts, kind):
        opts, given = kind(), dict(zip((*fields, "timeout"), rest, strict=False)) | others
        for name, field in FIELDS.items():
            value = given.pop(name, None)
            if value is not None:
                setattr(opts, field, value)
        others = {name: value for name, value in given.items() if name in others}
    return opts, others


def _hide_from_dynamo(function: Any) -> None:
    """Effect: a compiled program calls the function as it is, as it does the methods of torch's own groups."""
    function._torchdynamo_disable = True
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # Since torch 2.6.
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    else:
        frames.skip_code(function.__code__)


def in_turn(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """A function that calls the functions."""

    def run() -> None:
        for call in calls:
            call()

    return run


def plain(tensor: Tensor) -> Tensor:
    """The tensor, on the CPU with its elements in strides. Raises: UnsupportedError if it is another kind of tensor."""
    if type(tensor) is not torch.Tensor and type(tensor).__torch_dispatch__ != _PLAIN:
        functional = sys.modules.get(_FUNCTIONAL)
        if functional is None or not isinstance(tensor, functional.AsyncCollectiveTensor):
            raise UnsupportedError(f"collectives of {type(tensor).__name__}")
        tensor = tensor.trigger_wait()  # The result of a collective, once it is complete.
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise UnsupportedError(f"collectives of {tensor.layout} tensors on {tensor.device}")
    return tensor


def _check_writable(written: Sequence[Any]) -> None:
    """Raises: ValueError if elements of a tensor share memory, as those of an expanded tensor do."""
    for tensor in written if not written or isinstance(written[0], Tensor) else chain.from_iterable(written):
        if tensor.is_contiguous():
            continue
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"a tensor with strides {tuple(tensor.stride())} cannot be written to: pass a clone")


def listed(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    """A list of one tensor, which may be given as such. Raises: ValueError if it is a list of more or none."""
    found = [tensors] if isinstance(tensors, Tensor) else tensors
    if len(found) != 1:
        raise ValueError(f"expected one tensor or list of tensors per rank, got {len(found)}")
    return found


def per_rank(tensors: Sequence[Any], size: int) -> list[Tensor]:
    """The tensors, of a list or of one that holds only that list. Raises: ValueError if not one per rank; as plain."""
    if tensors and not isinstance(tensors[0], Tensor):
        (tensors,) = listed(list(tensors))
    if len(tensors) != size:
        raise ValueError(f"expected {size} tensors, one per rank; got {len(tensors)}")
    return [plain(tensor) for tensor in tensors]


def check_same_type(*tensors: Tensor) -> None:
    """Raises: ValueError unless all have one type."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise ValueError(f"tensors of different types: {', '.join(sorted(map(str, types)))}")


def check_match(whole: Tensor, part: Tensor, times: int = 1) -> None:
    """Raises: ValueError unless `whole` has `times` as many elements as `part`, of the same type."""
    check_same_type(whole, part)
    if whole.numel() != part.numel() * times:
        expected = f"{part.numel()} elements" if times == 1 else f"{times} times {part.numel()} elements"
        raise ValueError(f"expected {expected} in a tensor, got {whole.numel()}")


def split_elements(tensor: Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Elements of each rank's part of the tensor, which has `rows` rows; equal parts if `rows` is empty.

    Raises: ValueError if the rows do not add up to the tensor's.
    """
    total, rows = tensor.shape[0] if tensor.dim() else 1, [int(each) for each in rows]
    if not rows and total % size:
        raise ValueError(f"{total} rows cannot be divided evenly among {size} ranks")
    parts = rows or [total // size] * size
    if len(parts) != size or sum(parts) != total or min(parts) < 0:
        raise ValueError(f"the splits {parts} do not add up to {total} rows for {size} ranks")
    return [part * (tensor.numel() // total if total else 0) for part in parts]
