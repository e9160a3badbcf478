"""What a rank wrote about its own failure: torch elastic's file, into which anybody may write anything."""

from __future__ import annotations

from cpulaunch.records.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "TORCHELASTIC_ERROR_FILE"
MOST_BYTES = 1 << 20
MOST_SECONDS = 253_402_300_799
"""The end of the year 9999; later times cannot be written as a date everywhere."""


@record
class RankError:
    """The text of an exception, with its traceback if there is one, and when it was (whole seconds since the epoch)."""

    text: str
    timestamp: int | None = None


def read_error(path: str) -> RankError | None:
    """The error in the file; None if there is no such file, or none of torch's.

    Source: torch elastic, ErrorHandler.record_exception: {"message": {"message": …, "extraInfo": {"py_callstack": …,
    "timestamp": "…"}}}, and ProcessFailure, which also takes {"message": "…", "timestamp": N}.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_BYTES)
    except OSError:
        return None
    import json

    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _error(content)


def copy_error_file(source: str, target: str, *, exit_code: int) -> None:
    """Effect: `target` holds what a rank wrote about its failure, and its exit code (minus the signal).

    Nothing is done where the rank wrote nothing, or `target` cannot be written. Source: torch elastic, @record around
    torchrun's main, dump_error_file.
    """
    import json

    try:
        with open(source, encoding="utf-8", errors="replace") as file:
            content = json.loads(file.read(MOST_BYTES))
        if isinstance(content, dict) and isinstance(content.get("message"), dict):
            content["message"]["errorCode"] = exit_code
        with open(target, "w", encoding="utf-8") as file:
            json.dump(content, file)
    except (OSError, ValueError, RecursionError):
        return


def _error(content: Any) -> RankError | None:
    if not isinstance(content, dict):
        return None
    message = content.get("message")
    if isinstance(message, str):
        return RankError(text=message, timestamp=_seconds(content.get("timestamp")))
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    said = extra.get("py_callstack", message.get("message"))
    return RankError(text=str(said).rstrip(), timestamp=_seconds(extra.get("timestamp")))


def _seconds(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(MOST_SECONDS)):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= MOST_SECONDS else None
