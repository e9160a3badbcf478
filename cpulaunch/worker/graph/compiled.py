"""torch.compile around a module in eval mode: inductor with frozen weights, or AMD's zentorch."""

from __future__ import annotations

import time
import types
from contextlib import ExitStack
from typing import Any

import torch

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.graph.capture import Call, Captured, check, random_state_kept
from cpulaunch.worker.graph.precision import Precision, widened


def _template(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


class Compiler:
    """torch.compile with this launch's backend and mode. Effect: inductor freezes weights when gradients are off."""

    def __init__(self, settings: TorchSettings, precision: Precision) -> None:
        self._precision = precision
        self._options: dict[str, Any] = {"backend": settings.graph}
        if settings.graph == "zentorch":
            import zentorch  # noqa: F401  It registers the backend.
        else:
            import torch._inductor.config as inductor

            inductor.freezing = True
            self._options |= {"mode": settings.compile_mode} if settings.compile_mode else {}

    def capture(self, call: Call, eager: Any) -> Captured:
        """The compiled call, compared with its eager result. Dynamo's own guards say when it holds.

        Raises: MismatchError, and whatever the compiler raises.
        """
        started = time.perf_counter()
        # A code object of its own: what Dynamo compiled for other weights must not be found again.
        function = types.FunctionType(_template.__code__.replace(co_name="compiled_call"), globals())
        compiled = torch.compile(function, dynamic=False, **self._options)
        run = self._runner(compiled)
        with random_state_kept(), ExitStack() as contexts:
            low = self._precision.enter(contexts, call.module).low
            contexts.close()
            error = check(eager, run(call), low_precision=low)
        return Captured(
            run=run,
            holds=lambda other: True,
            error=error,
            seconds=time.perf_counter() - started,
            bytes=sum(tensor.untyped_storage().nbytes() for tensor in call.module.parameters()),
            low_precision=low,
        )

    def _runner(self, compiled: Any) -> Any:
        def run(call: Call) -> Any:
            with ExitStack() as contexts:
                mode = self._precision.enter(contexts, call.module)
                result = compiled(call.module, call.args, call.kwargs)
            return widened(result) if mode.widen else result

        return run
