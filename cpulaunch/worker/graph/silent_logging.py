"""Calls of loggers in a traced call, which Dynamo refuses, although most of them write nothing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

_LEVELS: dict[object, int] = {
    logging.Logger.debug: logging.DEBUG,
    logging.Logger.info: logging.INFO,
    logging.Logger.warning: logging.WARNING,
    logging.Logger.error: logging.ERROR,
    logging.Logger.exception: logging.ERROR,
    logging.Logger.critical: logging.CRITICAL,
}


class SilentCalls(set[Callable[..., Any]]):
    """A set of all methods of loggers that write nothing now; `used` has the loggers and levels it was asked for.

    These are the methods of levels that are not enabled, and those that write a message only once, such as
    transformers' `warning_once`: the eager call before the trace has written it.
    """

    def __init__(self, calls: Iterable[Callable[..., Any]] = ()) -> None:
        super().__init__(calls)
        self.used: set[tuple[logging.Logger, int]] = set()

    def __contains__(self, method: object) -> bool:
        function, logger = getattr(method, "__func__", None), getattr(method, "__self__", None)
        if not isinstance(logger, logging.Logger):
            return super().__contains__(method)
        if isinstance(function, functools._lru_cache_wrapper):
            return True
        level = _LEVELS.get(function)
        if level is None or logger.isEnabledFor(level):
            return False
        self.used.add((logger, level))
        return True


@contextmanager
def silent_calls_left_out() -> Iterator[SilentCalls]:
    """Effect: inside the context Dynamo leaves out the calls in this set; old versions refuse them, as without it.

    Source: torch/_dynamo/variables, LoggingLoggerVariable.call_method.
    """
    import torch._dynamo.config as config

    calls = SilentCalls(getattr(config, "ignore_logger_methods", ()))
    with config.patch(ignore_logger_methods=calls) if hasattr(config, "ignore_logger_methods") else nullcontext():
        yield calls


def are_silent(used: frozenset[tuple[logging.Logger, int]]) -> bool:
    """Whether none of these loggers is enabled for its level now."""
    return not any(logger.isEnabledFor(level) for logger, level in used)
