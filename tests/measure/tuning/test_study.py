"""Studies: what survives the end of the process, at any moment, and who may use one."""

import fcntl
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import suppress

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")
import optuna
import sqlalchemy

from cpulaunch.measure.tuning.database import FILE, database_errors
from cpulaunch.measure.tuning.study import Study, hold, make_folder
from cpulaunch.records.errors import CpulaunchError
from tests.measure.tuning.recorded import SPACE
from tests.strangers import UID, as_other_user, folder_of_stranger, needs_root

strangers = pytest.fixture(folder_of_stranger)

TUNING = """
import sys
from cpulaunch.measure.tuning.search import run_search
from cpulaunch.measure.tuning.study import Study
from cpulaunch.measure.tuning.trial import Baseline
from tests.measure.tuning.recorded import SPACE, setup_for, table

def told(trial, best):
    print(trial.number, repr(sorted(trial.configuration.items())), trial.ratio, flush=True)

study = Study(sys.argv[1], SPACE, seed=3)
run_search(setup_for(table({}), max_trials=int(sys.argv[2]), notify=told), study, Baseline(), ())
"""


def start(folder, trials):
    return subprocess.Popen(
        [sys.executable, "-c", TUNING, str(folder), str(trials)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
    )


def kill_and_resume(folder, kills, draw):
    """Every trial that was told, over so many processes, each killed a random number of bytes after its first trial."""
    told = []
    for _ in range(kills):  # Each beyond another trial: three kills of one configuration would fail it.
        process = start(folder, 10_000)
        lines = [process.stdout.readline() for _ in range(draw.randrange(1, 4))]
        for _ in range(draw.randrange(200_000)):
            pass  # A moment within the next trial, which no event marks.
        process.send_signal(signal.SIGKILL)
        rest, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        told += [line for line in (*lines, *rest.splitlines(keepends=True)) if line.endswith("\n")]
    return told


def check_nothing_lost(folder, told):
    study = Study(str(folder), SPACE, seed=3)
    kept = {f"{each.number} {sorted(each.configuration.items())!r} {each.ratio}\n" for each in study.trials()}
    assert set(told) <= kept
    assert len(told) == len(set(told))
    numbers = [trial.number for trial in study.trials()]
    assert numbers == sorted(set(numbers))
    study.close()


@pytest.mark.slow
def test_no_finished_trial_is_lost_by_kills(tmp_path):
    kills = int(os.environ.get("TUNE_KILLS", "4"))
    told = kill_and_resume(tmp_path, kills, random.Random(5))
    assert len(told) >= kills
    check_nothing_lost(tmp_path, told)


def test_an_unfinished_trial_is_tried_again(tmp_path):
    study = Study(str(tmp_path), SPACE, seed=1)
    number, _ = study.begin({})
    study.finish(number, 1.0, {"values": [1.0]})
    study.begin({"graph": "onednn"})
    study.close()
    study = Study(str(tmp_path), SPACE, seed=1)
    assert [trial.number for trial in study.trials()] == [0]
    assert study.waiting
    number, configuration = study.begin({"threads": 1})
    assert configuration == {"graph": "onednn"}
    study.fail(number, "no memory", {"values": []})
    assert [(trial.number, trial.failure) for trial in study.trials()] == [(0, None), (2, "no memory")]
    assert not study.waiting
    study.close()


@pytest.mark.parametrize("step", ["set_user_attr", "enqueue_trial", "tell"])
@pytest.mark.parametrize("done", [False, True])
def test_a_kill_while_an_unfinished_trial_is_put_back_loses_nothing(tmp_path, monkeypatch, step, done):
    study = Study(str(tmp_path), SPACE, seed=1)
    study.begin({"graph": "onednn"})
    effect = getattr(study._study, step)

    def killed(*arguments, **options):
        if done:
            effect(*arguments, **options)
        raise SystemExit

    monkeypatch.setattr(study._study, step, killed)
    with pytest.raises(SystemExit):
        study.interrupt()
    study.close()
    study = Study(str(tmp_path), SPACE, seed=1)
    assert study.trials() == ()
    assert study.begin({})[1] == {"graph": "onednn"}
    assert not study.waiting
    study.close()


def test_a_configuration_that_ends_the_search_again_and_again_has_failed(tmp_path):
    for _ in range(3):
        study = Study(str(tmp_path), SPACE, seed=1)
        number, _ = study.begin({"graph": "onednn"})
        study.close()
    study = Study(str(tmp_path), SPACE, seed=1)
    failed = [(trial.number, trial.configuration, trial.failure) for trial in study.trials()]
    assert failed == [(number, {"graph": "onednn"}, "the search was killed 3 times while it was tried")]
    assert not study.waiting
    study.close()
    study = Study(str(tmp_path), SPACE, seed=1)
    assert [trial.failure for trial in study.trials()] == ["the search was killed 3 times while it was tried"]
    study.close()


@pytest.mark.parametrize("step", ["set_user_attr", "enqueue_trial", "tell"])
@pytest.mark.parametrize("done", [False, True])
def test_only_kills_while_a_configuration_is_tried_count(tmp_path, monkeypatch, step, done):
    """It was killed once while it was tried, and is killed again and again while it is put back."""
    study = Study(str(tmp_path), SPACE, seed=1)
    study.begin({"graph": "onednn"})
    study.close()
    for _ in range(4):
        with monkeypatch.context() as patched:
            patched.setattr(optuna.Study, step, _killing(getattr(optuna.Study, step), after=done))
            with suppress(SystemExit):
                Study(str(tmp_path), SPACE, seed=1).close()
    study = Study(str(tmp_path), SPACE, seed=1)
    assert study.trials() == ()
    assert study.begin({})[1] == {"graph": "onednn"}
    assert not study.waiting
    study.close()


def _killing(effect, *, after):
    """A method of a study in which the process is killed, before or after its effect, unless it counts sessions."""

    def killed(study, *arguments, **options):
        if arguments[:1] == ("sessions",):
            return effect(study, *arguments, **options)
        if after:
            effect(study, *arguments, **options)
        raise SystemExit

    return killed


def test_a_kill_before_a_trials_launch_loses_nothing_and_says_nothing_against_it(tmp_path):
    wanted = {each.name: "-" for each in SPACE} | {"graph": "onednn"}
    study = Study(str(tmp_path), SPACE, seed=1)
    study._enqueue(wanted)
    for _ in range(4):
        assert study._study.ask().params == {}  # Its values are not written yet.
        study.close()
        study = Study(str(tmp_path), SPACE, seed=1)
        assert (study.trials(), study.waiting) == ((), True)
    assert study.begin({})[1] == {"graph": "onednn"}
    study.close()


def test_a_kill_after_a_trials_launch_says_nothing_against_it(tmp_path, monkeypatch):
    for number in range(4):
        study = Study(str(tmp_path), SPACE, seed=1)
        assert study.begin({"graph": "onednn"}) == (number, {"graph": "onednn"})
        with monkeypatch.context() as patched:
            patched.setattr(study._study, "tell", _killed)
            with pytest.raises(SystemExit):
                study.finish(number, 1.5, {"values": [1.5]}) if number % 2 else study.fail(number, "no", {})
        study.close()
    study = Study(str(tmp_path), SPACE, seed=1)
    assert (study.trials(), study.waiting) == ((), True)
    study.close()


def _killed(*arguments, **options):
    raise SystemExit


def test_a_database_with_tables_of_another_optuna_is_an_error_with_a_way_out(tmp_path):
    Study(str(tmp_path), SPACE, seed=1).close()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("UPDATE alembic_version SET version_num = 'v9.9.9.a'")
    connection.commit()
    connection.close()
    with pytest.raises(CpulaunchError, match="another version of optuna") as error:
        Study(str(tmp_path), SPACE, seed=1)
    assert "--fresh" in error.value.hint
    study = Study(str(tmp_path), SPACE, seed=1, fresh=True)
    assert study.trials() == ()
    study.close()


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (("PRAGMA max_page_count=1", "CREATE TABLE a (b)"), "disk is full\nhint: free the disk"),
        (("PRAGMA query_only=1", "CREATE TABLE a (b)"), "readonly database\nhint: free the disk"),
        (("SELECT * FROM trials",), "no such table: trials\nhint: --fresh"),
    ],
    ids=str,
)
def test_only_a_broken_database_is_to_be_begun_anew(statements, said):
    engine = sqlalchemy.create_engine("sqlite://")

    def use():
        with database_errors("folder"), engine.connect() as connection:
            for each in statements:
                connection.execute(sqlalchemy.text(each))

    with pytest.raises(CpulaunchError, match=said):
        use()
    engine.dispose()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE study_user_attributes SET value_json = '{{'",
        "UPDATE study_user_attributes SET value_json = '\"x\"'",
        "UPDATE trial_user_attributes SET value_json = '\"x\"'",
        "UPDATE trial_user_attributes SET value_json = '{\"values\": 5}' WHERE key = 'facts'",
        "UPDATE trial_user_attributes SET value_json = '{\"metrics\": [1]}' WHERE key = 'facts'",
        "UPDATE trial_user_attributes SET value_json = '{\"disturbed\": 1}' WHERE key = 'facts'",
        f"UPDATE trial_user_attributes SET value_json = '{'[' * 100_000}'",
        f"UPDATE trial_params SET distribution_json = '{'[' * 100_000}'",
        "UPDATE trial_values SET value_type = 'INF_POS'",
        "UPDATE trial_user_attributes SET value_json = '{\"values\": \"12\"}' WHERE key = 'facts'",
        "UPDATE trial_user_attributes SET value_json = json_set(value_json, '$.speed', -1.0) WHERE key = 'facts'",
        "UPDATE trial_params SET param_value = 99",
    ],
)
def test_a_database_that_the_program_changed_is_to_be_begun_anew(tmp_path, statement):
    study = Study(str(tmp_path), SPACE, seed=1)
    study.add_baseline(50.0, 1.0, {}, speed=50.0)
    number, _ = study.begin({"threads": 1})
    study.finish(number, 2.0, {"values": [100.0], "speed": 100.0})
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute(statement)
    connection.commit()
    connection.close()

    study.close()

    def resume():
        with database_errors(str(tmp_path)):
            study = Study(str(tmp_path), SPACE, seed=1)
            try:
                study.trials()
                study.begin()
            finally:
                study.close()

    with pytest.raises(CpulaunchError, match="the database of the trials") as error:
        resume()
    assert "--fresh" in error.value.hint


def test_a_database_whose_study_the_program_removed_is_to_be_begun_anew(tmp_path):
    study = Study(str(tmp_path), SPACE, seed=1)
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("DELETE FROM studies")
    connection.commit()
    connection.close()
    with pytest.raises(CpulaunchError, match="the database of the trials"), database_errors(str(tmp_path)):
        study.begin()
    study.close()


def test_a_trial_that_the_program_ended_itself_is_an_error_of_the_database(tmp_path):
    study = Study(str(tmp_path), SPACE, seed=1)
    study.add_baseline(50.0, 1.0, {}, speed=50.0)
    number, _ = study.begin({"threads": 1})
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("UPDATE trials SET state = 'COMPLETE'")
    connection.commit()
    connection.close()
    with pytest.raises(CpulaunchError, match="the database of the trials"), database_errors(str(tmp_path)):
        study.finish(number, 2.0, {"values": [100.0], "speed": 100.0})
    study.close()


def test_an_error_of_another_part_is_none_of_the_database():
    with pytest.raises(KeyError), database_errors("folder"):
        raise KeyError("a")


def test_an_interrupt_is_no_kill(tmp_path):
    for _ in range(4):
        study = Study(str(tmp_path), SPACE, seed=1)
        assert study.begin({"graph": "onednn"})[1] == {"graph": "onednn"}
        study.interrupt()
        assert study.trials() == ()
        assert study.waiting
        study.close()


def test_ratios_follow_the_default_before_and_after_of_the_same_process(tmp_path):
    study = Study(str(tmp_path), SPACE, seed=1)
    study.add_baseline(50.0, 1.0, {}, speed=50.0)
    number, _ = study.begin({"threads": 1})
    study.finish(number, 2.0, {"values": [100.0], "speed": 100.0})
    same, _ = study.begin({"threads": 1, "allocator": "default"})
    study.finish(same, 2.0, {"same_as": number})
    assert [trial.ratio for trial in study.trials()] == [2.0, 2.0]
    for value in (100.0, 100.0):
        study.add_baseline(value, 1.0, {}, speed=value)
    study.close()
    study = Study(str(tmp_path), SPACE, seed=1)
    for _ in range(5):
        study.add_baseline(10.0, 1.0, {}, speed=10.0)
    assert [(trial.ratio, trial.earlier) for trial in study.trials()] == [(1.0, True), (1.0, True)]
    number, _ = study.begin({"graph": "onednn"})
    study.finish(number, 1.5, {"values": [15.0], "speed": 15.0})
    assert [(trial.ratio, trial.earlier) for trial in study.trials()][2:] == [(1.5, False)]
    assert [each["value"] for each in study.baselines()] == [50.0, 100.0, 100.0, *[10.0] * 5]
    study.close()


def test_the_log_is_written_ahead(tmp_path):
    import sqlite3

    study = Study(str(tmp_path), SPACE, seed=1)
    connection = sqlite3.connect(tmp_path / FILE)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
    study.close()


def test_one_process_at_a_time_uses_a_study(tmp_path):
    study = Study(str(tmp_path), SPACE, seed=1)
    with pytest.raises(CpulaunchError, match="another cpulaunch tune runs this study"):
        Study(str(tmp_path), SPACE, seed=1)
    study.close()
    Study(str(tmp_path), SPACE, seed=1).close()


def test_a_study_that_another_host_holds_is_not_used(tmp_path):
    folder = tmp_path / "key"
    folder.mkdir()
    with open(tmp_path / "key.lock", "w") as other:  # On NFS, hosts have the lock of a file in common, not a folder's.
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CpulaunchError, match="another cpulaunch tune runs this study"):
            Study(str(folder), SPACE, seed=1)
    assert not list(folder.iterdir())
    Study(str(folder), SPACE, seed=1, fresh=True).close()


def test_a_file_system_without_locks_is_told_from_another_search(tmp_path):
    fd = os.open(tmp_path, os.O_PATH)
    with pytest.raises(CpulaunchError, match=r"cannot be locked for this search.*Bad file descriptor"):
        hold(fd, str(tmp_path))
    os.close(fd)


def test_only_the_user_can_read_it_and_fresh_empties_it(tmp_path):
    folder = tmp_path / "state" / "tune" / "key"
    make_folder(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / FILE).write_text("old")
    (folder / "inner").mkdir()
    make_folder(str(folder))
    assert (folder / FILE).read_text() == "old"
    study = Study(str(folder), SPACE, seed=1, fresh=True)
    assert study.trials() == ()
    assert not (folder / "inner").exists()
    study.close()


def test_a_folder_that_others_can_read_is_closed_to_them(tmp_path):
    tmp_path.chmod(0o755)
    Study(str(tmp_path), SPACE, seed=1).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_fresh_leaves_a_study_alone_that_another_process_uses(tmp_path):
    study = Study(str(tmp_path), SPACE, seed=1)
    number, _ = study.begin({"threads": 1})
    for _ in range(2):
        with pytest.raises(CpulaunchError, match="another cpulaunch tune runs this study"):
            Study(str(tmp_path), SPACE, seed=1, fresh=True)
    study.finish(number, 2.0, {"values": []})
    study.close()
    study = Study(str(tmp_path), SPACE, seed=1)
    assert [trial.ratio for trial in study.trials()] == [2.0]
    study.close()
    study = Study(str(tmp_path), SPACE, seed=1, fresh=True)
    assert study.trials() == ()
    study.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CpulaunchError, match="cannot be used"):
        make_folder(str(tmp_path / "file" / "study"))


@needs_root
def test_a_folder_that_another_user_can_change_is_none_for_a_study(strangers):
    """As when root keeps that user's HOME: SQLite would follow a link that comes instead of its file."""
    folder = strangers / "state" / "tune"
    with pytest.raises(CpulaunchError, match=rf"{strangers} belongs to user {UID}[^\0]*XDG_STATE_HOME"):
        make_folder(str(folder))
    assert not list(strangers.iterdir())
    os.chown(strangers, 0, 0)
    strangers.chmod(0o777)
    with pytest.raises(CpulaunchError, match=f"{strangers} may be written by everyone"):
        make_folder(str(folder))
    strangers.chmod(0o755)
    assert make_folder(str(folder)) == str(folder)


@needs_root
def test_the_path_of_a_study_has_no_link_that_could_be_replaced(strangers, tmp_path):
    (strangers / "state").symlink_to(tmp_path)
    with pytest.raises(CpulaunchError, match="state is a symbolic link that others can rename"):
        make_folder(str(strangers / "state" / "tune"))
    os.chown(strangers, 0, 0)
    assert make_folder(str(strangers / "state" / "tune")) == str(tmp_path / "tune")


@needs_root
@pytest.mark.parametrize(("mode", "group", "works"), [(0o755, 0, True), (0o775, UID, True), (0o775, UID + 1, False)])
def test_a_home_may_be_writable_by_a_group_of_its_owner_alone(strangers, mode, group, works):
    os.chown(strangers, UID, group)
    strangers.chmod(mode)
    (strangers / ".local").mkdir()
    os.chown(strangers / ".local", UID, group)
    (strangers / ".local").chmod(mode)

    def make():
        try:
            make_folder(str(strangers / ".local" / "state" / "tune"))
        except CpulaunchError as error:
            raise OSError(str(error)) from None

    assert as_other_user(make) is works
