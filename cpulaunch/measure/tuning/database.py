"""The database of a study: optuna's storage in a file, and what its errors mean."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import traceback

import optuna
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from cpulaunch.records.errors import CpulaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

FILE = "study.sqlite3"
BUSY_SECONDS = 30
MAX_LENGTH = 1 << 24
"""Bytes of a text: the largest are all samples of the default, of some 300 bytes each."""
MAX_ROWS, MAX_VALUES = 1 << 18, 1 << 20
"""Rows of a table, and values in all JSON together."""
VALUES = "SELECT total(length({0}) - length(replace(replace(replace({0}, ',', ''), '[', ''), '{{', ''))) FROM {1}"
OF_THE_PLACE = ("locked", "full", "readonly", "I/O", "unable to open", "locking protocol")
"""Words of SQLite's errors that say nothing against what is in the database. Source: SQLite, sqlite3ErrStr()."""
FRESH = "--fresh begins a new one"
OTHER_PLACE = "free the disk or the file, or set XDG_STATE_HOME to another folder"
STUDY = "cpulaunch.measure.tuning.study"
"""The module whose errors may come from what is in the database."""


def open_storage(path: str) -> optuna.storages.RDBStorage:
    """optuna's storage in a file with a write-ahead log, each transaction of which is on the disk when it ends.

    Raises: CpulaunchError if a version of optuna wrote it whose tables are others, and later too, if the program has
    put more there than a search writes.
    """

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_LENGTH)
        _check_contents(connection, path)
        return connection

    # No path in the URL, where "?", "%" and braces mean something else.
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{FILE}", engine_kwargs={"creator": connect})
    except RuntimeError:
        raise CpulaunchError(
            "another version of optuna wrote the database of the trials",
            value=f"{path}; this is optuna {optuna.__version__}",
            hint=FRESH,
        ) from None

    def set_up(connection: Any, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    def check(connection: Any, entry: Any, _: object) -> None:
        version = connection.execute("PRAGMA data_version").fetchall()
        if version != entry.info.get("version"):  # Another process has written, or another connection of this one.
            _check_contents(connection, path)
            entry.info["version"] = version

    event.listen(storage.engine, "connect", set_up)
    event.listen(storage.engine, "checkout", check)
    storage.engine.dispose()
    return storage


def _check_contents(connection: sqlite3.Connection, path: str) -> None:
    """Raises: CpulaunchError if the database has more than is to be read into memory, or what optuna never makes.

    A trigger or a view may take for ever.
    """
    objects = connection.execute("SELECT type, name FROM sqlite_master").fetchall()
    found = {f"a {kind}" for kind, _ in objects if kind not in ("table", "index")}
    values = 0.0
    for name in () if found else (name for kind, name in objects if kind == "table"):
        table = '"{}"'.format(name.replace('"', '""'))
        if connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] > MAX_ROWS:
            found.add(f"more than {MAX_ROWS:,} rows")
        if name == "trial_params" or name.endswith("_attributes"):
            column = "distribution_json" if name == "trial_params" else "value_json"
            values += connection.execute(VALUES.format(column, table)).fetchone()[0]
    if values > MAX_VALUES:
        found.add(f"more than {MAX_VALUES:,} values")
    if found:
        raise CpulaunchError(
            "the database of the trials holds what no search wrote",
            value=f"{path}: {', '.join(sorted(found))}",
            hint=FRESH,
        )


@contextlib.contextmanager
def database_errors(folder: str) -> Iterator[None]:
    """A context in which errors of the database are CpulaunchErrors: it is broken, or the disk is full.

    So are errors of the study about what it reads there, as the program may have changed it.
    """
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = next((each.orig for each in (error, error.__cause__) if getattr(each, "orig", None)), error)
        raise CpulaunchError(
            "the database of the trials cannot be used",
            value=f"{os.path.join(folder, FILE)}: {reason}",
            hint=OTHER_PLACE if any(each in str(reason) for each in OF_THE_PLACE) else FRESH,
        ) from None
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError) as error:
        if not _is_of_study(error):
            raise
        raise CpulaunchError(
            "the database of the trials holds what no search wrote",
            value=f"{os.path.join(folder, FILE)}: {type(error).__name__}: {error}",
            hint=FRESH,
        ) from None


def _is_of_study(error: BaseException) -> bool:
    """Whether an error was raised by the study, or by optuna for it."""
    return any(frame.f_globals.get("__name__") == STUDY for frame, _ in traceback.walk_tb(error.__traceback__))
