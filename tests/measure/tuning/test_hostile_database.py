"""A database into which the program has put what takes for ever, or all memory, ends its search with a sentence."""

import os
import signal
import sqlite3
from contextlib import closing

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")

from cpulaunch.cli.measuring.tune_arguments import MOST_TRIALS
from cpulaunch.launch.monitor.worker_report import MAX_METRICS
from cpulaunch.measure.tuning import database
from cpulaunch.measure.tuning.database import FILE, SUFFIXES, database_errors
from cpulaunch.measure.tuning.study import Study
from cpulaunch.records.errors import CpulaunchError
from tests.measure.tuning.recorded import SPACE

MOST_SECONDS = 120
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
ATTRIBUTE = "INSERT INTO study_user_attributes (study_id, key, value_json) VALUES (1, '{}', {})"
NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 9 UNION ALL SELECT x + 1 FROM n WHERE x < {}) "
SLOW = "instr(hex(zeroblob(9000)), hex(zeroblob(4000)) || '1' || {})"
SCHEMA = "UPDATE sqlite_master SET sql = substr(sql, 1, length(sql) - 1) || {} WHERE name = 'trials' AND type = 'table'"
HOSTILE = {
    "a trigger": (f"CREATE TRIGGER a AFTER INSERT ON trials BEGIN SELECT ({ENDLESS}); END",),
    "a view": ("ALTER TABLE trials RENAME TO others", f"CREATE VIEW trials AS {ENDLESS}"),
    "an index of an expression": (f"CREATE INDEX a ON trials ({SLOW.format('number')})",),
    "a part of an index": (f"CREATE INDEX a ON trials (number) WHERE {SLOW.format('number')} > 0",),
    "a generated column": (
        "ALTER TABLE trials RENAME COLUMN state TO s",
        f"ALTER TABLE trials ADD COLUMN state AS (CASE WHEN {SLOW.format('number')} THEN 1 ELSE s END)",
    ),
    "a constraint": (
        "PRAGMA writable_schema = ON",
        SCHEMA.format(f"""', CHECK ({SLOW.format("number").replace("'", "''")} >= 0))'"""),
    ),
    "a default": ("ALTER TABLE trials ADD COLUMN x DEFAULT (1)",),
    "a virtual table": ("CREATE VIRTUAL TABLE a USING fts5(x)",),
    "capitals": (
        "ALTER TABLE trial_user_attributes RENAME TO others",
        "ALTER TABLE others RENAME TO TRIAL_USER_ATTRIBUTES",
    ),
    "values": (ATTRIBUTE.format("x", "'[' || replace(hex(zeroblob(2000)), '0', '[],') || '0]'"),),
    "values of objects": (ATTRIBUTE.format("x", "'[' || replace(hex(zeroblob(700)), '0', '{},') || '0]'"),),
    "values in nested lists": (ATTRIBUTE.format("x", "replace(hex(zeroblob(250)), '0', '[[[[0]]]],')"),),
    "values of a parameter": (
        "INSERT INTO trial_params (trial_id, param_name, distribution_json) "
        "VALUES (1, 'x', replace(hex(zeroblob(2000)), '0', '[],'))",
    ),
    "rows": (NUMBERS.format(3009) + "INSERT INTO trials (trial_id, number, study_id, state) "
             "SELECT x, x, 1, 'COMPLETE' FROM n",),
    "too big": (ATTRIBUTE.format("x", "hex(zeroblob(10000))"),),
}  # fmt: skip
SAID = {
    **dict.fromkeys(HOSTILE, "table that optuna"),
    **{name: f"{name.split()[1]} that optuna" for name in ("a trigger", "a view", "an index of an expression")},
    "a part of an index": "index that optuna",
    **{name: "more than 2,000 values" for name in HOSTILE if name.startswith("values")},
    "rows": "more than 2,000 rows",
    "too big": "too big",
}


@pytest.fixture
def _deadline():
    """A search that runs for ever ends the tests, and does not hang them: SQLite calls no function of Python."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MOST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_deadline")
@pytest.mark.parametrize("said", HOSTILE)
def test_a_search_ends_and_so_does_the_next_one(tmp_path, monkeypatch, said):
    monkeypatch.setattr(database, "MAX_VALUES", dict.fromkeys(database.MAX_VALUES, 2000))
    monkeypatch.setattr(database, "MAX_ROWS", 2000)
    monkeypatch.setattr(database, "MAX_LENGTH", 15_000)
    study = Study(str(tmp_path), SPACE, seed=1)
    study.add_baseline(50.0, 1.0, {}, speed=50.0)
    number, _ = study.begin({"threads": 1})
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        for statement in HOSTILE[said]:
            connection.execute(statement)
        connection.commit()
    with (
        pytest.raises(CpulaunchError, match=f"the database of the trials.*{SAID[said]}"),
        database_errors(str(tmp_path)),
    ):
        study.finish(number, 2.0, {"values": [100.0], "speed": 100.0})
    study.close()
    with pytest.raises(CpulaunchError, match="the database of the trials") as error, database_errors(str(tmp_path)):
        Study(str(tmp_path), SPACE, seed=1)
    assert "--fresh" in error.value.hint
    Study(str(tmp_path), SPACE, seed=1, fresh=True).close()


@pytest.mark.usefixtures("_deadline")
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("linked", [False, True], ids=["pipe", "link"])
def test_a_pipe_in_place_of_a_file_of_the_database_is_not_opened(tmp_path, suffix, linked):
    folder = tmp_path / "study"
    folder.mkdir(mode=0o700)
    Study(str(folder), SPACE, seed=1).close()
    name = folder / (FILE + suffix)
    name.unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe" if linked else name)
    if linked:
        name.symlink_to(tmp_path / "pipe")
    with pytest.raises(CpulaunchError, match="cannot be used") as error, database_errors(str(folder)):
        Study(str(folder), SPACE, seed=1)
    assert (error.value.value, error.value.hint) == (f"{name}: not a regular file", database.FRESH)
    Study(str(folder), SPACE, seed=1, fresh=True).close()


def test_the_longest_search_that_can_be_asked_for_is_no_hostile_one(tmp_path):
    """As many trials, each with 18 settings and 164 values: the space of a server, and five metrics."""
    Study(str(tmp_path), SPACE, seed=1).close()
    trials = NUMBERS.format(9 + MOST_TRIALS)
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute(
            trials + "INSERT INTO trial_user_attributes (trial_id, key, value_json) "
            "SELECT x, 'facts', '[' || replace(hex(zeroblob(82)), '0', '1,') || '0]' FROM n"
        )
        connection.execute(
            trials + "INSERT INTO trial_params (trial_id, param_name, distribution_json) "
            "SELECT n.x, m.x, '[1,2,3,4,5,6,7,8]' FROM n JOIN (SELECT x FROM n LIMIT 18) AS m"
        )
        database._check_contents(connection, FILE)
    samples = MOST_TRIALS // 5
    assert database.MAX_VALUES["trial_user_attributes"] > MOST_TRIALS * MAX_METRICS
    assert samples * MAX_METRICS < database.MAX_VALUES["study_user_attributes"]
    assert samples * MAX_METRICS * len('"metric/012": 1234.567890123456, ') < database.MAX_LENGTH


def test_a_look_that_takes_too_long_ends(tmp_path, monkeypatch):
    Study(str(tmp_path), SPACE, seed=1).close()
    monkeypatch.setattr(database, "CHECK_SECONDS", -1)
    monkeypatch.setattr(database, "STEPS", 1)
    with pytest.raises(CpulaunchError, match="interrupted"), database_errors(str(tmp_path)):
        Study(str(tmp_path), SPACE, seed=1)


def test_what_a_search_writes_itself_is_looked_at_once_for_each_connection(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr(database, "_check_contents", lambda *given: looks.append(given))
    study = Study(str(tmp_path), SPACE, seed=1)
    begun = len(looks)
    for _ in range(3):
        number, _ = study.begin({"threads": 1})
        study.finish(number, 2.0, {"values": [100.0]})
    assert len(looks) == begun
    study.close()
