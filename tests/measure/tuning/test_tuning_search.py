"""The search on tables: how near to the best it comes, and that what fails or is wrong never wins."""

import json
import math
import statistics
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="the extra tune is not installed")

from cpulaunch.measure.samples import Disturbance, Sample
from cpulaunch.measure.tuning.finalists import choose_finalists
from cpulaunch.measure.tuning.search import best_trial, run_search
from cpulaunch.measure.tuning.study import Study
from cpulaunch.measure.tuning.tables import read_table
from cpulaunch.measure.tuning.trial import Baseline, Guard
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.worker.reporting.checksums import checksum_parts
from tests.measure.tuning.recorded import SPACE, replay, setup_for, share_of_best, table

INT8, BF16, FP32 = (("weights", value) for value in ("int8", "bf16", "fp32"))
GRAPH, AUTOCAST, ONE_THREAD = ("graph", "onednn"), ("precision", "bf16"), ("threads", 1)
PROGRAMS = {
    "generation": {INT8: 1.1, BF16: 0.6, FP32: 0.1, GRAPH: -0.9, AUTOCAST: -0.3, ONE_THREAD: -0.3},
    "encoder": {INT8: 0.2, BF16: 0.3, FP32: 0.05, GRAPH: 0.5, AUTOCAST: 0.7, ONE_THREAD: -0.6},
    "tiny": {INT8: -0.2, BF16: -0.2, FP32: -0.1, GRAPH: -0.4, AUTOCAST: -0.5, ONE_THREAD: 0.5},
    "allocating": {ONE_THREAD: -0.2, ("allocator", "default"): -0.3, ("allocator", "jemalloc"): 0.12, GRAPH: 0.05},
    "indifferent": {},
}
RECORDED = sorted((Path(__file__).parent / "tables").glob("*.json"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_twelve_trials_come_within_three_percent_of_the_best(name):
    recorded = table(PROGRAMS[name])
    shares = []
    for seed in range(10):
        trials = replay(recorded, seed=seed)
        assert len(trials) <= 12
        shares.append(share_of_best(recorded, trials))
    assert statistics.median(shares) >= 0.97


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_so_they_do_on_tables_recorded_on_a_machine(path):
    recorded = read_table(json.loads(path.read_text()))
    shares = [share_of_best(recorded, replay(recorded, seed=seed)) for seed in range(10)]
    assert statistics.median(shares) >= 0.97


def test_the_default_and_the_levels_come_first():
    trials = replay(table({}), max_trials=4)
    assert [trial.configuration for trial in trials[:3]] == [
        {"weights": "fp32", "graph": "onednn"},
        {"weights": "bf16", "graph": "onednn", "precision": "bf16"},
        {"weights": "int8", "graph": "onednn", "precision": "bf16"},
    ]


FAILURES = {
    INT8: "it exited with code 1: RuntimeError: boom",
    BF16: "it was still running after 60 s",
    GRAPH: "the kernel ended it for want of memory",
}


def test_what_crashes_hangs_or_runs_out_of_memory_never_wins_and_says_why():
    recorded = table({INT8: 3.0, BF16: 3.0, GRAPH: 3.0, AUTOCAST: 0.3}, failures=FAILURES)
    trials = replay(recorded, max_trials=20)
    failed = [trial for trial in trials if trial.ratio is None]
    assert {trial.failure for trial in failed} == set(FAILURES.values())
    assert best_trial(trials).configuration.get("precision") == "bf16"
    assert not {INT8, BF16, GRAPH} & set(best_trial(trials).configuration.items())


def test_wrong_outputs_never_win():
    recorded = table({INT8: 3.0, AUTOCAST: 0.3})
    right, wrong = checksum_parts([1.0, 2.0]), checksum_parts([1.0, 2.5])

    def launch(configuration):
        outputs = {"logits": wrong if configuration.get("weights") == "int8" else right}
        value = recorded.median_speed(configuration)
        return Sample(value=value, seconds=1.0, checksums=outputs)

    guard = Guard(references=[{"logits": right}], max_error=0.01)
    trials = replay(recorded, launch=launch, guard=guard)
    failures = {trial.failure for trial in trials if trial.configuration.get("weights") == "int8"}
    assert failures == {"output 'logits' differs by 0.2; 0.01 is allowed"}
    assert best_trial(trials).configuration["precision"] == "bf16"


def test_each_worker_of_a_launch_is_compared():
    right, wrong = checksum_parts(1), checksum_parts(2)
    report = {"workers": [{"checksums": {"a": right}}, {"checksums": {"a": wrong}}]}
    guard = Guard(references=[{"a": right}])
    assert "differs by 1" in guard.failure(Sample(value=1.0, seconds=1.0, report=report))
    assert guard.failure(Sample(value=1.0, seconds=1.0, checksums={"a": right})) is None


def test_each_rank_of_a_job_is_compared_with_itself():
    first, second, wrong = checksum_parts([1.0]), checksum_parts([2.0]), checksum_parts([3.0])

    def failure(*ranks):
        report = {"workers": [{"checksums": each} for each in ranks]}
        return guard.failure(Sample(value=1.0, seconds=1.0, report=report))

    guard = Guard(references=[{"loss": first, "all": first}, {"loss": second}, {}], by_rank=True)
    assert failure({"loss": first, "all": first}, {"loss": second}, {}) is None
    assert failure({"loss": first, "all": first}) is None, "fewer ranks have no more to compare"
    assert failure({"loss": first, "all": first}, {"loss": wrong}, {}).startswith("rank 1: output 'loss' differs")
    assert "rank 0: output 'all' was not given" in failure({"loss": first}, {"loss": second}, {})


def test_a_slow_configuration_is_measured_once_and_the_best_ones_three_times():
    trials = replay(table({INT8: -1.0, BF16: 0.5}))
    launches = {trial.configuration.get("weights"): len(trial.facts["values"]) for trial in trials}
    assert launches["int8"] == 1
    assert max(len(trial.facts["values"]) for trial in trials) == 3
    assert all(trial.pruned for trial in trials if len(trial.facts["values"]) == 1)


def test_drift_of_the_machine_does_not_favour_early_trials():
    recorded, launches = table({INT8: 0.2, AUTOCAST: 0.2}, noise=0.001), []

    def launch(configuration):
        launches.append(configuration)
        slower = 0.97 ** len(launches)
        return Sample(value=recorded.median_speed(configuration) * slower, seconds=1.0)

    trials = replay(recorded, launch=launch, max_trials=16)
    assert launches.count({}) > 3, "the default is measured between trials"
    best = best_trial(trials).configuration
    assert (best.get("weights"), best.get("precision")) == ("int8", "bf16")


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("factor", [1 / 1.5, 1.5])
def test_one_disturbed_launch_of_the_default_does_not_defeat_it(slow, factor):
    recorded, defaults = table({ONE_THREAD: math.log(1.25)}, noise=0.003), []

    def launch(configuration):
        value = recorded.median_speed(configuration)
        if not configuration:
            defaults.append(value)
            value *= factor if len(defaults) == slow + 1 else 1
        return Sample(value=value, seconds=1.0)

    trials = replay(recorded, launch=launch)
    assert choose_finalists(trials)[0]["threads"] == 1
    others = [trial.ratio for trial in trials if "threads" not in trial.configuration]
    assert all(math.isclose(ratio, 1, rel_tol=0.03) for ratio in others)


def test_a_slow_sample_that_was_disturbed_is_measured_again_and_so_is_the_default():
    recorded, launches = table({ONE_THREAD: math.log(1.25)}, noise=0.003), []

    def launch(configuration):
        value = recorded.median_speed(configuration)
        launches.append(configuration)
        if configuration.get("threads") and configuration not in launches[:-1]:
            return Sample(value=value / 2, seconds=1.0, disturbance=Disturbance(other_cpus=1.5))
        return Sample(value=value, seconds=1.0)

    trials = replay(recorded, launch=launch)
    disturbed = next(trial for trial in trials if trial.configuration.get("threads"))
    assert len(disturbed.facts["values"]) == 3
    assert math.isclose(disturbed.ratio, 1.25, rel_tol=0.03)
    last = max(number for number, each in enumerate(launches) if each == disturbed.configuration)
    assert launches[last + 1] == {}


def test_configurations_that_do_the_same_are_launched_once():
    recorded, launches = table(PROGRAMS["encoder"]), []

    def launch(configuration):
        launches.append(frozenset(configuration.items()))
        return Sample(value=recorded.median_speed(configuration), seconds=1.0)

    def effect(configuration):
        if configuration.get("allocator"):
            return None  # Not installed here.
        return frozenset((name, value) for name, value in configuration.items() if name != "huge_pages")

    study = Study(None, SPACE, seed=0)
    plain = setup_for(recorded, launch=launch, max_trials=60)
    setup = type(plain)(**{name: getattr(plain, name) for name in plain.__slots__} | {"effect": effect})
    run_search(setup, study, Baseline(), ())
    assert len({effect(dict(each)) for each in launches}) == len(set(launches))
    assert not any("allocator" in dict(each) for each in launches)
    study.close()


def test_the_time_ends_a_search():
    left = iter([1.0, 1.0, 0.0])
    assert len(replay(table({}), seconds_left=lambda: next(left))) == 2


def test_a_default_that_fails_ends_it_with_the_reason():
    recorded = table({})
    failing = lambda configuration: Sample(value=None, seconds=1.0, failure="it exited with code 3")  # noqa: E731
    with pytest.raises(CpulaunchError, match="it exited with code 3"):
        replay(recorded, launch=failing)
