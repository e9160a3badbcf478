"""ipex.optimize for models in eval mode, as by `ipexrun --auto-ipex`, but only where the results stay correct.

ipexrun rewrote the script, put every model into eval mode and kept its first weights. Here a model is optimized at its
first top-level call in eval mode without gradients, and its first optimized result is compared with its own. After a
change of its weights or hooks, or an exception, the model runs without ipex again.
"""

from __future__ import annotations

import threading
from functools import wraps
from importlib import import_module, metadata

import torch

from cpulaunch.records.record import record
from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.reporting.degradation import degraded
from cpulaunch.worker.reporting.events import report_event
from cpulaunch.worker.tensors.references import ByIdentity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PACKAGE = "intel_extension_for_pytorch"
WARM_UP_CALLS = 3
"""The number of calls that ipexrun makes: tracing, profiling and optimizing runs of TorchScript."""


@record
class Optimized:
    """`run` calls the optimized copy of a model; `weights`: those it was made from."""

    run: Callable[..., Any]
    weights: Any


class _ThreadState(threading.local):
    inside = False


def install(settings: TorchSettings) -> str:
    """Effect: models are optimized at their first call. Raises: RuntimeError without a matching release of ipex."""
    if settings.graph != "off":
        raise RuntimeError(f"cannot be combined with --graph {settings.graph}, which captures the same models")
    if settings.precision == "fp16":
        raise RuntimeError("ipex supports fp32 and bf16, not fp16")
    version = matching_version()
    module: Any = torch.nn.Module
    module.__call__ = _Models(settings, module.__call__).intercept()
    return f"ipex.optimize {version} at each model's first call, {_dtype(settings)}"


def matching_version() -> str:
    """The installed release of ipex.

    Raises: RuntimeError unless it matches this torch, because importing another release exits the process.
    Source: intel_extension_for_pytorch/__init__.py 2.8 (os._exit(127) unless both have the same major and minor).
    """
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise RuntimeError(
            f"{PACKAGE} is not installed (extra ipex, for torch 2.8 only); --graph onednn works without it"
        ) from None
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise RuntimeError(f"{PACKAGE} {version} is not compatible with torch {torch.__version__}; --graph onednn is")
    return version


def _dtype(settings: TorchSettings) -> torch.dtype:
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


class _Models:
    """The models called so far, each with its optimized copy, or None if it runs without ipex."""

    def __init__(self, settings: TorchSettings, plain: Callable[..., Any]) -> None:
        self._settings = settings
        self._plain = plain
        self._thread_state = _ThreadState()
        self._lock = threading.Lock()
        self._seen: ByIdentity[Optimized | None] = ByIdentity()

    def intercept(self) -> Callable[..., Any]:
        """The replacement for torch.nn.Module.__call__."""
        plain, state = self._plain, self._thread_state

        @wraps(plain)
        def call(module: Any, *arguments: Any, **named: Any) -> Any:
            if state.inside or module.training or not self._may_drop_gradients() or _is_traced():
                return plain(module, *arguments, **named)
            state.inside = True
            try:
                return self._top_level(module, arguments, named)
            finally:
                state.inside = False

        return call

    def _may_drop_gradients(self) -> bool:
        return self._settings.inference_mode or not torch.is_grad_enabled()

    def _top_level(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if module not in self._seen and self._lock.acquire(blocking=False):  # Else another thread optimizes.
            try:
                self._seen[module] = None  # Remains if the model cannot be optimized.
                if _can_be_optimized(module):
                    return self._first_call(module, arguments, named)
            finally:
                self._lock.release()
        optimized = self._seen.get(module)
        if optimized is None:
            return self._plain(module, *arguments, **named)
        if not optimized.weights.unchanged() or _has_hooks(module):
            self._give_up(module, "its weights or hooks were changed after its first call")
            return self._plain(module, *arguments, **named)
        try:
            return self._run(optimized.run, arguments, named)
        except Exception as error:  # noqa: BLE001 - the original model shows whether the call is wrong
            self._give_up(module, f"{type(error).__name__}: {error}")
            return self._plain(module, *arguments, **named)

    def _run(self, run: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of the optimized model, with bf16 tensors converted to fp32."""
        from cpulaunch.worker.graph.precision import widened

        low = self._settings.precision == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low), torch.no_grad():
            result = run(*arguments, **named)
        return widened(result) if low else result

    def _first_call(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The model's own result. Effect: optimizes the model for later calls, if the optimized result is the same."""
        result = self._plain(module, *arguments, **named)
        try:
            self._seen[module] = self._optimize(module, arguments, named, result)
        except Exception as error:  # noqa: BLE001 - the program continues with the original model
            self._give_up(module, f"{type(error).__name__}: {error}")
        else:
            report_event("captured", module=type(module).__name__, engine="ipex", signature=str(_dtype(self._settings)))
        return result

    def _optimize(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any], expected: Any) -> Optimized:
        """The optimized model. Raises: ValueError if the results differ or hooks would be lost; any error of ipex."""
        from cpulaunch.worker.graph.weights import Weights

        if _has_hooks(module):
            raise ValueError("it has hooks")
        dtype = _dtype(self._settings)
        model = import_module(PACKAGE).optimize(module, dtype=dtype, graph_mode=True, inplace=False).eval()
        for _ in range(WARM_UP_CALLS):
            result = self._run(model, arguments, named)
        self._compare(expected, result)
        return Optimized(run=model, weights=Weights(module))

    def _compare(self, expected: Any, result: Any) -> None:
        """Raises: ValueError if the results differ by more than rounding."""
        from torch.utils._pytree import tree_leaves

        from cpulaunch.worker.tensors.compare import LOW_PRECISION, ROUNDING, largest_error

        low = self._settings.precision == "bf16"
        eager, optimized = (
            [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in (expected, result)
        )
        _, reason = largest_error(eager, optimized, LOW_PRECISION if low else ROUNDING)
        if reason is not None:
            raise ValueError(f"its result differs: {reason}")

    def _give_up(self, module: Any, reason: str) -> None:
        self._seen[module] = None
        name = type(module).__name__
        report_event("eager", module=name, reason=reason)
        degraded(self._settings, "ipex", f"{name} runs without ipex: {reason}")


def _is_traced() -> bool:
    """Whether torch is tracing or compiling this call, and must see the original model."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()


def _can_be_optimized(module: Any) -> bool:
    """Whether the model has weights and the program has not compiled it already."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return not compiled and not isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters())


def _has_hooks(module: Any) -> bool:
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
