"""A database into which the program has put what takes for ever, or all memory, ends its search with a sentence."""

import sqlite3
from contextlib import closing

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")

from cpulaunch.measure.tuning import database
from cpulaunch.measure.tuning.database import FILE, database_errors
from cpulaunch.measure.tuning.study import Study
from cpulaunch.records.errors import CpulaunchError
from tests.measure.tuning.recorded import SPACE

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
ATTRIBUTE = "INSERT INTO study_user_attributes (study_id, key, value_json) VALUES (1, '{}', {})"
NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 9 UNION ALL SELECT x + 1 FROM n WHERE x < {}) "
HOSTILE = {
    "a trigger": (f"CREATE TRIGGER a AFTER INSERT ON trials BEGIN SELECT ({ENDLESS}); END",),
    "a view": ("ALTER TABLE trials RENAME TO others", f"CREATE VIEW trials AS {ENDLESS}"),
    "values": (ATTRIBUTE.format("x", "'[' || replace(hex(zeroblob(2000)), '0', '[],') || '0]'"),),
    "values in nested lists": (ATTRIBUTE.format("x", "replace(hex(zeroblob(250)), '0', '[[[[0]]]],')"),),
    "values of a parameter": (
        "INSERT INTO trial_params (trial_id, param_name, distribution_json) "
        "VALUES (1, 'x', replace(hex(zeroblob(2000)), '0', '[],'))",
    ),
    "rows": (NUMBERS.format(3009) + "INSERT INTO trials (trial_id, number, study_id, state) "
             "SELECT x, x, 1, 'COMPLETE' FROM n",),
    "too big": (ATTRIBUTE.format("x", "hex(zeroblob(10000))"),),
}  # fmt: skip


@pytest.mark.parametrize("said", HOSTILE)
def test_a_search_ends_and_so_does_the_next_one(tmp_path, monkeypatch, said):
    for limit, most in (("MAX_VALUES", 2000), ("MAX_ROWS", 2000), ("MAX_LENGTH", 15_000)):
        monkeypatch.setattr(database, limit, most)
    study = Study(str(tmp_path), SPACE, seed=1)
    study.add_baseline(50.0, 1.0, {}, speed=50.0)
    number, _ = study.begin({"threads": 1})
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        for statement in HOSTILE[said]:
            connection.execute(statement)
        connection.commit()
    with (
        pytest.raises(CpulaunchError, match=f"the database of the trials.*{said.split()[0]}"),
        database_errors(str(tmp_path)),
    ):
        study.finish(number, 2.0, {"values": [100.0], "speed": 100.0})
    study.close()
    with pytest.raises(CpulaunchError, match="the database of the trials") as error, database_errors(str(tmp_path)):
        Study(str(tmp_path), SPACE, seed=1)
    assert "--fresh" in error.value.hint
    Study(str(tmp_path), SPACE, seed=1, fresh=True).close()


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
