"""The database of a study: optuna's storage in a file, and what its errors mean."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
import traceback
from functools import cache

import optuna
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from cpulaunch.records.errors import CpulaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

FILE = "study.sqlite3"
SUFFIXES = ("", "-journal", "-wal", "-shm")
"""Of the database and of the files that SQLite keeps beside it. Source: SQLite, "Temporary Files Used By SQLite"."""
BUSY_SECONDS = 30
CHECK_SECONDS = 60
"""For a look at what is in the database, which takes two for the largest that a search writes."""
STEPS = 100
"""Of SQLite's machine, between two looks at the time: a few rows, of up to 64 MiB each."""
MAX_LENGTH = 1 << 26
"""Bytes of a text: the largest are all samples of the default, each of up to 25 KB with a thousand metrics."""
MAX_ROWS = 1 << 20
"""Of a table: ten thousand trials have 50 parameters each."""
MAX_VALUES = {
    "study_user_attributes": 1 << 21,
    "study_system_attributes": 1 << 16,
    "trial_user_attributes": 1 << 24,
    "trial_system_attributes": 1 << 22,
    "trial_params": 1 << 22,
}
"""In the JSON of a table: ten thousand trials and two thousand samples of the default have a thousand metrics each.

optuna copies what is about the study at every look.
"""
VALUES = "length({0}) - length(replace(replace(replace({0}, ',', ''), '[', ''), '{{', ''))"
OF_THE_PLACE = ("locked", "full", "readonly", "I/O", "unable to open", "locking protocol")
"""Words of SQLite's errors that say nothing against what is in the database. Source: SQLite, sqlite3ErrStr()."""
MADE = "SELECT type, name, tbl_name, sql FROM sqlite_master"
KINDS = ("table", "index", "trigger", "view")
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
        _check_files(path)
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


@cache
def _tables_of_optuna() -> frozenset[tuple[str, str, str, str]]:
    """The tables and indexes of a new database of this optuna, with how SQLite says that they were made."""
    storage = optuna.storages.RDBStorage("sqlite://")
    with storage.engine.connect() as connection:
        return frozenset(_made(connection.exec_driver_sql(MADE)))


def _made(rows: Iterable[Sequence[str | None]]) -> Iterator[tuple[str, str, str, str]]:
    """The objects of a schema, without the spaces in their statements, which depend on a version."""
    for kind, name, table, statement in rows:
        yield str(kind), str(name), str(table), "".join((statement or "").split())


def _check_files(path: str) -> None:
    """Raises: CpulaunchError if one of the database's files is a link or no file: SQLite waits in a pipe for ever."""
    for name in (path + suffix for suffix in SUFFIXES):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(name).st_mode):
                raise CpulaunchError(
                    "the database of the trials cannot be used", value=f"{name}: not a regular file", hint=FRESH
                )


def _check_contents(connection: sqlite3.Connection, path: str) -> None:
    """Raises: CpulaunchError if the database has more than is to be read into memory, or what optuna never makes.

    A trigger, a view, an index or a generated column may take for ever.
    """
    end = time.monotonic() + CHECK_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)
    made = set(_made(connection.execute(MADE)))
    kinds = {kind if kind in KINDS else "object" for kind, *_ in made - _tables_of_optuna()}
    found = {f"{kind} that optuna {optuna.__version__} does not make" for kind in kinds}
    found = found or _excesses(connection, sorted(name for kind, name, *_ in made if kind == "table"))
    connection.set_progress_handler(None, 0)
    if found:
        raise CpulaunchError(
            "the database of the trials holds what no search wrote",
            value=f"{path}: {', '.join(sorted(found))}",
            hint=FRESH,
        )


def _excesses(connection: sqlite3.Connection, tables: Sequence[str]) -> set[str]:
    """What these tables have more of than a search writes."""
    rows = [f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {MAX_ROWS + 1})" for table in tables]
    if any(connection.execute(each).fetchone()[0] > MAX_ROWS for each in rows):
        return {f"more than {MAX_ROWS:,} rows"}
    found = set()
    for table in MAX_VALUES.keys() & set(tables):
        count = VALUES.format("distribution_json" if table == "trial_params" else "value_json")
        if connection.execute(f"SELECT total({count}) FROM {table}").fetchone()[0] > MAX_VALUES[table]:
            found.add(f"more than {MAX_VALUES[table]:,} values")
    return found


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
