"""Calls of loggers in a traced call, which Dynamo refuses, although most of them write nothing; and warnings."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cpulaunch.records.record import record

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
"""Methods of loggers and their adapters, and the level of what they write."""

_WITH_LEVEL = ("log", "isEnabledFor")
"""Methods whose first argument is a level."""


@record
class SilentCall:
    """A call of a method of a logger, or of an adapter, that wrote nothing when it was traced.

    `function`: what the method was. `level`: that of its message, or the one asked about. `messages`: of a method that
    writes a message only once, how many it had written. `answer`: what it returned.
    """

    logger: Any
    name: str
    function: Callable[..., Any]
    level: int | None = None
    messages: int = 0
    answer: bool | None = None

    def is_silent(self) -> bool:
        """Whether the logger still has this method, which would do and return the same now."""
        if _function(self.logger, self.name) is not self.function:
            return False
        if self.level is None:
            return _messages(self.function) >= max(self.messages, 1)
        return bool(self.logger.isEnabledFor(self.level)) is bool(self.answer)


def silent_call(logger: Any, name: str, arguments: list[Any]) -> SilentCall | None:
    """A call of this method that writes nothing now; None if it may.

    It writes nothing if its level is not enabled, or if it writes a message only once, such as transformers'
    `warning_once`: the eager call before the trace has written it. `arguments`: those that are constants; NOT_CONSTANT
    stands for others, each of which may be another message.
    """
    function = _function(logger, name)
    if function is None:
        return None
    level = _level(logger, name, function, arguments)
    if level is None:
        if not isinstance(function, functools._lru_cache_wrapper) or NOT_CONSTANT in arguments:
            return None
        call = SilentCall(logger=logger, name=name, function=function, messages=_messages(function))
    else:
        answer = bool(logger.isEnabledFor(level)) if name == "isEnabledFor" else None
        call = SilentCall(logger=logger, name=name, function=function, level=level, answer=answer)
    return call if call.is_silent() else None


NOT_CONSTANT = object()


def _function(logger: Any, name: str) -> Any:
    """The function of a method; None if there is no such method, or it is the object's own."""
    return getattr(getattr(logger, name, None), "__func__", None)


def _level(logger: Any, name: str, function: object, arguments: list[Any]) -> int | None:
    """The level that decides whether the method, one of logging's own, writes something; None if there is none."""
    kind = logging.LoggerAdapter if isinstance(logger, logging.LoggerAdapter) else logging.Logger
    own = {name, "isEnabledFor", "log"} if kind is logging.LoggerAdapter else {name}
    if any(_function(logger, each) is not getattr(kind, each, None) for each in own):
        return None
    if name in _WITH_LEVEL:
        return arguments[0] if arguments and type(arguments[0]) is int else None
    return _LEVELS.get(name)


def _messages(function: Callable[..., Any]) -> int:
    """How many messages a cached function has written, which it never repeats; 0 if it may."""
    if not isinstance(function, functools._lru_cache_wrapper):
        return 0
    known = function.cache_info()
    return known.currsize if known.maxsize is None else 0


@contextmanager
def silent_calls_left_out() -> Iterator[set[SilentCall]]:
    """The calls that Dynamo leaves out, in this thread, inside the context. Effect: it leaves out silent ones only.

    Those that the program lets Dynamo leave out, or move behind the graph, are lost only where the program compiles.
    Source: torch/_dynamo/variables, LoggingLoggerVariable.call_method; torch/_dynamo/config.py.
    """
    import torch._dynamo.config as config
    from torch._dynamo.variables import misc, user_defined

    used: set[SilentCall] = set()
    names = ("ignore_logger_methods", "reorderable_logging_functions")
    with config.patch({name: set() for name in names if hasattr(config, name)}), ExitStack() as contexts:
        for kind in (getattr(misc, "LoggingLoggerVariable", None), user_defined.UserDefinedObjectVariable):
            if kind is not None:
                contexts.enter_context(_answering(kind, used))
        yield used


@contextmanager
def _answering(kind: Any, used: set[SilentCall]) -> Iterator[None]:
    """Effect: inside the context, silent calls of the objects of Dynamo's class become constants, and are recorded."""
    plain, thread = kind.call_method, threading.get_ident()

    @functools.wraps(plain)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        value = getattr(self, "value", None)
        if isinstance(value, logging.Logger | logging.LoggerAdapter) and threading.get_ident() == thread:
            call = silent_call(value, name, [_constant(each) for each in (*args, *kwargs.values())])
            if call is not None:
                from torch._dynamo.variables import ConstantVariable

                used.add(call)
                return ConstantVariable.create(call.answer)
        return plain(self, tx, name, args, kwargs)

    own = vars(kind).get("call_method")
    kind.call_method = call_method
    try:
        yield
    finally:
        if own is None:
            del kind.call_method
        else:
            kind.call_method = own


def _constant(variable: Any) -> Any:
    """The Python value of Dynamo's variable; NOT_CONSTANT if it has none that is known."""
    try:
        return variable.as_python_constant()
    except Exception:  # noqa: BLE001  Dynamo raises errors of several types.
        return NOT_CONSTANT


def are_silent(used: frozenset[SilentCall]) -> bool:
    """Whether none of these calls would write something now."""
    return all(call.is_silent() for call in used)


@contextmanager
def silent_warnings() -> Iterator[None]:
    """Effect: warnings are ignored inside the context; after it the program's are repeated no more than before it.

    Any change of the filters lets Python forget which warnings each module has given, by the version in its registry.
    Source: cpython/Python/_warnings.c, already_warned.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = _filters_version() - 2  # This context and its filter are one change each, and so is its end.
        known = [(each, dict(each)) for each in _registries() if each.get("version") == before]
        try:
            yield
        finally:
            after = _filters_version() + 1
            for registry, given in known:
                registry.update(given, version=after)


def _filters_version() -> int:
    """The version of the filters for warnings, as of which registries are valid. All warnings must be ignored."""
    registry: dict[Any, Any] = {}
    warnings.warn_explicit("", UserWarning, "", 1, registry=registry)
    return int(registry.get("version", 0))


def _registries() -> list[dict[Any, Any]]:
    found = [getattr(module, "__dict__", {}).get("__warningregistry__") for module in tuple(sys.modules.values())]
    return [each for each in found if isinstance(each, dict)]


_LOGGERS = ("torch._subclasses.fake_tensor", "torch._dynamo.variables.ctx_manager", "torch._dynamo.variables.torch")
"""What these write about a trace is about nothing that the program has asked for; the refusal names what matters."""


@contextmanager
def dynamo_logs_off() -> Iterator[None]:
    """Effect: Dynamo prints no stack traces and no notes on profilers on stderr."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
