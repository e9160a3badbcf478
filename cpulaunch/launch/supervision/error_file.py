"""The file in which torch elastic's @record stores the exception of a failed rank. Its content is not trusted."""

from __future__ import annotations

from cpulaunch.records.plan import LATEST_SECONDS
from cpulaunch.records.record import record
from cpulaunch.system.files.reading import read_start
from cpulaunch.system.files.writing import write_at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "TORCHELASTIC_ERROR_FILE"
MAX_BYTES = 1 << 20
MAX_TRACEBACK = 1 << 16
"""Characters of the traceback of a rank, which may write any; each is twelve bytes of JSON at most."""
MAX_MARK = 64
"""Characters of the line that says how many are left out."""


@record
class RankError:
    """An exception: its traceback, or its message alone, and its Unix time in whole seconds."""

    text: str
    timestamp: int | None = None


def read_error(path: str, folder: int | None = None) -> RankError | None:
    """The exception in an error file; None if there is no such file, or it has another format."""
    return error_in(read_json(path, folder))


def error_in(content: Any) -> RankError | None:
    """The exception in what an error file holds; None if it has another format.

    Source: torch elastic, ErrorHandler.record_exception: {"message": {"message": …, "extraInfo": {"py_callstack": …,
    "timestamp": "…"}}}, and ProcessFailure, which also accepts {"message": "…", "timestamp": N}.
    """
    if not isinstance(content, dict):
        return None
    message = content.get("message")
    if isinstance(message, str):
        return RankError(text=shortened(message), timestamp=_seconds(content.get("timestamp")))
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    text = extra.get("py_callstack", message.get("message"))
    if not isinstance(text, str):
        return None
    return RankError(text=shortened(text.rstrip()), timestamp=_seconds(extra.get("timestamp")))


def shortened(text: str) -> str:
    """The traceback, or both ends of a longer one: where it began, and the exception itself."""
    if len(text) <= MAX_TRACEBACK:
        return text
    half = (MAX_TRACEBACK - MAX_MARK) // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def copy_error_file(source: str, target: str, *, exit_code: int, folder: int | None = None) -> None:
    """Effect: `target` holds the exception that a rank recorded in `source`, with an exit code (minus a signal).

    `source` may be a name in the folder of this descriptor. Nothing happens where it has no content, or `target` cannot
    be written. Source: torch elastic, @record around torchrun's main, dump_error_file.
    """
    content = read_json(source, folder)
    if content is None:
        return
    import json

    if isinstance(content, dict) and isinstance(content.get("message"), dict):
        content["message"]["errorCode"] = exit_code
    try:
        write_at_once(target, json.dumps(content).encode())
    except (OSError, ValueError, RecursionError):  # The latter two for numbers and nesting that can only be read.
        return


def read_json(path: str, folder: int | None = None) -> Any:
    """The value in a JSON file; None if it cannot be read or is no JSON."""
    try:
        text = read_start(path, max_bytes=MAX_BYTES, folder=folder).decode("utf-8", "replace")
    except OSError:
        return None
    import json

    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _seconds(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(LATEST_SECONDS)):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= LATEST_SECONDS else None
