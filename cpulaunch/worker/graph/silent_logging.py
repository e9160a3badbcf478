"""Calls of loggers in a traced call, which Dynamo refuses, although most of them write nothing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cpulaunch.records.record import record

_LEVELS: dict[object, int] = {
    logging.Logger.debug: logging.DEBUG,
    logging.Logger.info: logging.INFO,
    logging.Logger.warning: logging.WARNING,
    logging.Logger.error: logging.ERROR,
    logging.Logger.critical: logging.CRITICAL,
}


@record
class SilentCall:
    """A method of a logger that wrote nothing when it was traced.

    `level`: that of its messages. `messages`: of a method that writes a message only once, how many it had written.
    """

    logger: logging.Logger
    function: Callable[..., Any]
    level: int | None = None
    messages: int = 0

    def is_silent(self) -> bool:
        """Whether the logger still has this method, and it writes nothing now."""
        method = getattr(self.logger, getattr(self.function, "__name__", ""), None)
        if getattr(method, "__func__", None) is not self.function:
            return False
        if self.level is not None:
            return not self.logger.isEnabledFor(self.level)
        return _messages(self.function) >= max(self.messages, 1)


class SilentCalls(set[Callable[..., Any]]):
    """A set of all methods of loggers that write nothing now; `used` has those it was asked for.

    These are the methods of levels that are not enabled, and those that write a message only once, such as
    transformers' `warning_once`: the eager call before the trace has written it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: set[SilentCall] = set()

    def __contains__(self, method: object) -> bool:
        function, logger = getattr(method, "__func__", None), getattr(method, "__self__", None)
        if function is None or not isinstance(logger, logging.Logger):
            return False
        level = _LEVELS.get(function)
        if level is None and not isinstance(function, functools._lru_cache_wrapper):
            return False
        call = SilentCall(logger=logger, function=function, level=level, messages=_messages(function))
        if call.is_silent():
            self.used.add(call)
            return True
        return False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """How to copy it: Dynamo copies its settings for its own records, and some loggers cannot be copied."""
        return set, ()


def _messages(function: Callable[..., Any]) -> int:
    """How many messages a cached function has written, which it never repeats; 0 if it may."""
    if not isinstance(function, functools._lru_cache_wrapper):
        return 0
    known = function.cache_info()
    return known.currsize if known.maxsize is None else 0


@contextmanager
def silent_calls_left_out() -> Iterator[SilentCalls]:
    """Effect: inside the context Dynamo leaves out the calls in this set; old versions refuse them, as without it.

    Those that the program lets Dynamo leave out, or move behind the graph, are lost only where the program compiles.
    Source: torch/_dynamo/variables, LoggingLoggerVariable.call_method; torch/_dynamo/config.py.
    """
    import torch._dynamo.config as config

    calls = SilentCalls()
    settings = {"ignore_logger_methods": calls, "reorderable_logging_functions": set()}
    with config.patch({name: value for name, value in settings.items() if hasattr(config, name)}):
        yield calls


def are_silent(used: frozenset[SilentCall]) -> bool:
    """Whether none of these calls would write something now."""
    return all(call.is_silent() for call in used)
