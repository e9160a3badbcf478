"""torch.compile around a module in eval mode: inductor with frozen weights, or AMD's zentorch."""

from __future__ import annotations

import gc
import time
import types
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch._inductor.codecache as codecache
import torch._inductor.cpu_vec_isa as cpu_vec_isa

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.worker.graph.capture import Call, Captured, check, preserved_random_state
from cpulaunch.worker.graph.dynamo import others_draws_kept
from cpulaunch.worker.graph.precision import Precision, widened
from cpulaunch.worker.graph.weights import Weights
from cpulaunch.worker.process.compile_cache import keep_headers
from cpulaunch.worker.tensors.mutation import storage_of
from cpulaunch.worker.tensors.owners import owned

NO_CURRENT_FOLDER = "import sys\nsys.path[:] = [each for each in sys.path if each]\n"


def _probe_without_current_folder() -> None:
    """Effect: the program in which torch tries the CPU's instructions imports nothing from the current folder.

    torch gives the program to `python -c`, which looks there first. Source: torch 2.13, torch/_inductor/cpu_vec_isa.py,
    VecISA._probe_load.
    """
    isa: Any = cpu_vec_isa.VecISA
    with suppress(AttributeError):
        if not isa._avx_py_load.startswith(NO_CURRENT_FOLDER):
            isa._avx_py_load = NO_CURRENT_FOLDER + isa._avx_py_load


def _loaded_code() -> list[types.ModuleType]:
    """The modules of compiled code, which torch keeps with their constants as long as the process lives.

    Source: torch 2.13, torch/_inductor/codecache.py, PyCodeCache.modules.
    """
    return list(getattr(codecache.PyCodeCache, "modules", ()))


def _count_constants(code: list[types.ModuleType], weights: Weights) -> None:
    """Effect: constants of compiled code in the memory of the weights are cpulaunch's."""
    memory = set(map(storage_of, weights.tensors)) - {0}
    for value in [value for each in code for value in vars(each).values()]:
        if isinstance(value, torch.Tensor) and storage_of(value) in memory:
            owned(value)


def _template(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


class Compiler:
    """torch.compile with the backend and mode of the settings. Effect: makes inductor freeze weights."""

    def __init__(self, settings: TorchSettings, precision: Precision) -> None:
        self._precision = precision
        self._options: dict[str, Any] = {"backend": settings.graph}
        keep_headers(codecache, settings)
        _probe_without_current_folder()
        if settings.graph == "zentorch":
            import zentorch  # noqa: F401  The import registers the backend.
        else:
            import torch._inductor.config as inductor

            inductor.freezing = True
            self._options |= {"mode": settings.compile_mode} if settings.compile_mode else {}

    def capture(self, call: Call, eager: Any, weights: Weights) -> Captured:
        """The compiled call, compared with its eager result. It is valid for any call: Dynamo checks its own guards.

        Raises: MismatchError, and any error of the compiler.
        """
        started, loaded = time.perf_counter(), len(_loaded_code())
        # A new code object: Dynamo must not reuse what it compiled for other weights.
        function = types.FunctionType(_template.__code__.replace(co_name="compiled_call"), globals())
        compiled = torch.compile(function, dynamic=False, **self._options)
        run = self._runner(compiled)
        with preserved_random_state(), others_draws_kept(), ExitStack() as contexts:
            low = self._precision.enter(contexts, call.module).low
            contexts.close()
            try:
                error = check(eager, run(call), low_precision=low)
            finally:
                _count_constants(_loaded_code()[loaded:], weights)
                if weights.are_held_elsewhere():  # By what the compiler has left in cycles: folded normalizations.
                    gc.collect()
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
