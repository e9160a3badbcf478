"""From figures to bottlenecks: each kind by figures that show it and nothing else."""

import json
from pathlib import Path

import pytest

from cpulaunch.measure.diagnosis.advice import ADVICE
from cpulaunch.measure.diagnosis.bottlenecks import Bottleneck, ProcessLimits, remote_share
from cpulaunch.measure.diagnosis.diagnosis import diagnosis_of, overhead, sentence
from cpulaunch.measure.diagnosis.diagnosis_json import diagnosis_json
from cpulaunch.measure.diagnosis.diagnosis_text import diagnosis_text
from cpulaunch.measure.diagnosis.figures import read_figures
from cpulaunch.measure.diagnosis.folder import FiguresReader
from cpulaunch.measure.diagnosis.rates import NO_CEILINGS, Ceilings, rates
from cpulaunch.measure.diagnosis.shares import shares_of
from cpulaunch.records.record import replace
from cpulaunch.records.torch_settings import FETCHES, FIGURES, figures_name
from tests import json_output
from tests.measure.diagnosis.given import data, figures, window

MACHINE = ProcessLimits(cpus=frozenset({0, 1}), threads=2, nodes={0: 0, 1: 0}, remote_slowdown=1.0)
TWO_NODES = ProcessLimits(cpus=frozenset(range(4)), nodes={0: 0, 1: 0, 2: 1, 3: 1}, remote_slowdown=2.1)
TINY = {"tiny": 900, "forward": 1000, "all": 1000}


def diagnosis(*processes, limits=MACHINE, ceilings=None):
    return diagnosis_of(processes, {}, limits, ceilings or NO_CEILINGS)


CASES = {
    "data-wait": {"sums": {"data_seconds": 0.8, "data_cpu": 0.05, "thread_cpu": 0.25}, "loader_workers": 0},
    "decode": {"sums": {"data_seconds": 0.8, "data_cpu": 0.78}, "loader_workers": 0},
    "synchronization": {
        "window": window(0.1, tiny={"synchronization": 0.06, "seconds": 0.03}, calls={**TINY, "synchronization": 500})
    },
    "tiny-operations": {"window": window(0.1, tiny={"seconds": 0.09}, calls=TINY)},
    "python-loop": {"window": window(0.1, tiny={"seconds": 0.09}, calls={**TINY, "accesses": 500})},
    "python-code": {"window": window(0.1, kinds={"products": 0.03}, pauses=0.07)},
    "waiting": {"window": window(0.1, kinds={"products": 0.03}, pauses=0.07), "sums": {"thread_cpu": 0.3}},
    "wrong-binding": {"cpus": "0"},
    "oversubscribed": {"threads": 32, "sums": {"thread_cpu": 0.2, "thread_delay": 0.8}},
    "python-threads": {
        "sums": {"thread_cpu": 0.5, "thread_delay": 0.5, "process_cpu": 2.0, "process_delay": 2.1},
        "busy_threads": [{"seconds": 3.0, "delay": 4.0, "cpus": "0-1", "is_beside": True}] * 3,
    },
    "allocator": {
        "window": window(0.1, kinds={"other": 0.1}),
        "sums": {"thread_stime": 0.7, "thread_minflt": 100_000, "process_minflt": 200_000},
    },
    "growing-memory": {
        "window": window(0.1, kinds={"other": 0.1}),
        "sums": {"thread_stime": 0.7, "thread_minflt": 1e5, "process_minflt": 1e5, "rss": 1e5 * 4096},
    },
    "low-precision": {"window": window(0.1, kinds={"low products": 0.1}), "slowdowns": {"bf16": 20.0}},
    "memory-bound": {"window": window(0.1, kinds={"other": 0.09, "products": 0.01}, chained=0.07)},
    "slow-collective": {"sums": {"collective_seconds": 0.8, "thread_cpu": 0.2}},
}


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_by_its_figures(kind):
    found = diagnosis(figures(**CASES[kind]))
    assert found.first is not None
    assert found.first.kind == kind
    assert 0.4 < found.first.share <= 1


def test_products_all_the_time_are_no_bottleneck():
    assert diagnosis(figures()).first is None


def test_every_kind_has_advice_and_a_case():
    assert set(CASES) | {"straggler", "remote-memory"} == set(ADVICE)


def test_rules_that_are_named_exist():
    pages = Path(__file__).parents[3] / "docs" / "rules"
    assert [
        advice.rule for advice in ADVICE.values() if advice.rule and not (pages / f"{advice.rule}.md").exists()
    ] == []


def test_remote_memory_on_a_machine_with_two_nodes():
    remote = figures(cpus="0-1", threads=2, world_size=2, snapshot={"pages": {"0": 1 << 20, "1": 9 << 20}})
    assert remote_share(remote, TWO_NODES) == 0.9
    found = diagnosis(remote, limits=TWO_NODES)
    assert (found.first.kind, found.first.detail) == ("remote-memory", "90%")
    assert found.first.share == pytest.approx(1 - 1 / (1 + 0.9 * 1.1))


@pytest.mark.parametrize(
    ("cpus", "pages"), [("0-1", {"0": 9}), ("0-3", {"0": 5, "1": 4}), ("2-3", {"1": 7}), ("0-1", {})]
)
def test_memory_beside_its_threads_is_not_remote(cpus, pages):
    assert remote_share(figures(cpus=cpus, snapshot={"pages": pages}), TWO_NODES) == 0


def rank(number, *, own, waits, **changes):
    """A rank whose steps last 100 ms."""
    sums = {"collective_seconds": 10 * waits, "thread_cpu": 10 * own}
    return figures(rank=number, index=number, world_size=2, threads=1, sums=sums, cpus=str(number), **changes)


def test_a_rank_with_more_work_is_a_straggler():
    found = diagnosis(rank(0, own=0.01, waits=0.09), rank(1, own=0.095, waits=0.005))
    assert (found.first.kind, found.first.detail, found.first.process) == ("straggler", "1", 1)
    assert found.main.figures.rank == 1


def test_ranks_that_all_wait_have_a_slow_collective():
    found = diagnosis(rank(0, own=0.02, waits=0.08), rank(1, own=0.025, waits=0.075))
    assert found.first.kind == "slow-collective"
    assert found.first.share == pytest.approx(0.75)


def ddp_rank(number, *, works, waits, threads=2):
    """A rank whose steps last 100 ms, and which waits in its backward passes, without a call of a collective."""
    sums = {"thread_cpu": 10 * works, "backward_cpu": 5 * works, "backward_seconds": 5 * works + 10 * waits}
    seen = window(0.1, kinds={"products": works}, pauses=waits, backward_waits=waits)
    own = {
        "rank": number,
        "index": number,
        "world_size": 2,
        "threads": threads,
        "cpus": f"{2 * number}-{2 * number + 1}",
    }
    return figures(sums=sums, window=seen, **own)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rank_that_waits_inside_its_backward_pass_waits_for_others(threads):
    ranks = ddp_rank(0, works=0.01, waits=0.09, threads=threads), ddp_rank(1, works=0.1, waits=0.0, threads=threads)
    found = diagnosis(*ranks, limits=ProcessLimits(cpus=frozenset(range(4)), threads=4))
    assert (found.first.kind, found.first.detail) == ("straggler", "1")
    assert found.processes[0].shares.collective == pytest.approx(0.9)
    assert found.processes[0].shares.waiting == pytest.approx(0, abs=0.01)


def test_ranks_that_all_wait_inside_their_backward_pass():
    ranks = [ddp_rank(number, works=0.02, waits=0.08) for number in (0, 1)]
    found = diagnosis(*ranks, limits=ProcessLimits(cpus=frozenset(range(4)), threads=4))
    assert found.first.kind == "slow-collective"


def test_collectives_without_a_hook_are_those_that_the_profiler_saw():
    seen = window(0.1, kinds={"products": 0.04, "collective": 0.06})
    found = diagnosis(figures(window=seen))
    assert (found.first.kind, found.first.share) == ("slow-collective", pytest.approx(0.6))


def test_threads_that_wait_for_one_another_are_no_collective():
    alone = ddp_rank(0, works=0.05, waits=0.05)
    seen = {**alone.window, "backward_waits": 0.0, "pauses": 0.0, "kinds": {"products": 0.1}}
    assert shares_of(replace(alone, window=seen), own_delay=False).collective == 0


def test_few_tiny_operations_that_take_the_time_stand_out():
    calls = {"tiny": 9, "forward": 10, "all": 10}
    found = diagnosis(figures(step=1e-4, window=window(1e-4, tiny={"seconds": 9e-5}, calls=calls)))
    assert (found.first.kind, found.first.detail) == ("tiny-operations", "9")


def test_one_access_in_a_short_step_is_no_loop():
    calls = {"tiny": 4, "forward": 5, "all": 5, "accesses": 1}
    found = diagnosis(figures(step=1e-4, window=window(1e-4, tiny={"seconds": 9e-5}, calls=calls)))
    assert found.first.kind == "tiny-operations"


def test_counts_are_of_one_step():
    calls = {"tiny": 900, "forward": 1000, "all": 1000, "synchronization": 60}
    seen = window(1.0, tiny={"seconds": 0.3, "synchronization": 0.5}, calls=calls)
    found = diagnosis(figures(window=seen, profiled_steps=10, profiled_seconds=1.0))
    assert (found.first.kind, found.first.detail) == ("synchronization", "6")


def test_of_a_cut_window_the_steps_that_were_looked_at_count():
    seen = window(0.05, kinds={"products": 0.01}, calls=TINY | {"synchronization": 500}, part=0.5)
    seen["tiny"]["synchronization"] = 0.04
    found = diagnosis(figures(window=seen))
    assert (found.first.kind, found.first.detail) == ("synchronization", "1000")
    assert found.remarks == (
        "of what the profiler saw, the first 50.0% were looked at: there were too many operations",
    )


def test_samples_of_a_generator_are_not_said_to_come_from_getitem():
    where = {"samples": 10, "doing": {"generator": 10}, "places": [["generator", "train.py:3", 10]]}
    found = diagnosis(figures(window=window(0.1, kinds={"products": 0.03}, pauses=0.07), where=where))
    assert found.first.kind == "decode"
    text = sentence(found.first, 0.1)
    assert ("in a generator" in text, "__getitem__" in text) == (True, False)


def test_without_the_profiler_nothing_is_said_to_stand_out_or_not():
    text = diagnosis_text(diagnosis(figures(window=None)), width=80, strong=str)
    assert text.startswith("not known: the profiler did not see where 100% of a step went")


def test_what_one_rank_alone_has_is_no_bottleneck_of_the_job():
    sleeping = window(0.1, pauses=0.09, kinds={"products": 0.01})
    found = diagnosis(rank(0, own=0.01, waits=0.09), rank(1, own=0.095, waits=0.005, window=sleeping))
    assert found.first.kind == "straggler"


def test_ranks_on_the_same_cpus_take_them_from_one_another():
    ranks = [figures(rank=number, world_size=2, threads=2, sums={"thread_delay": 0.5}) for number in (0, 1)]
    assert diagnosis(*ranks).first.kind == "oversubscribed"


def test_a_process_that_seldom_computes_takes_no_cpus_from_another():
    seldom = {"thread_cpu": 0.02, "process_cpu": 0.02}
    helper = figures(pid=8, window=window(0.1, kinds={"products": 0.002}, pauses=0.098), sums=seldom)
    busy = figures(sums={"thread_cpu": 1.0, "process_cpu": 1.6, "process_delay": 0.4})
    found = diagnosis(busy, helper)
    assert found.first.kind == "waiting"
    assert found.second is None
    both = diagnosis(busy, replace(busy, pid=8))
    assert (both.first.kind, both.first.share) == ("oversubscribed", pytest.approx(0.5))


def test_operations_that_wait_for_a_thread_without_a_cpu_hide_no_other_bottleneck():
    sums = {"data_seconds": 0.25, "data_cpu": 0.2, "thread_cpu": 0.8, "thread_delay": 0.2, "process_delay": 0.7}
    seen = window(0.1, kinds={"products": 0.02}, delay=0.06, absorbed=0.06)
    found = diagnosis(figures(sums=sums, loader_workers=0, window=seen))
    assert (found.first.kind, found.first.share) == ("decode", pytest.approx(0.5, abs=0.01))
    assert found.main.shares.others == pytest.approx(0.6)
    alone = diagnosis(figures(sums=sums, loader_workers=0, window=seen, threads=1))
    assert alone.first.share == pytest.approx(0.25, abs=0.01)


def test_what_other_programs_take_is_left_out_and_said():
    found = diagnosis(figures(sums={"thread_cpu": 0.4, "thread_delay": 0.6}))
    assert found.first is None
    assert found.main.shares.others == pytest.approx(0.6)
    assert "other programs took the CPU for 60% of the time" in found.remarks[0]


@pytest.mark.parametrize("kind", CASES)
def test_shares_add_up(kind):
    shares = shares_of(figures(**CASES[kind]), own_delay=kind == "oversubscribed")
    parts = [getattr(shares, name) for name in type(shares).__slots__ if name not in ("seconds", "others")]
    assert sum(parts) == pytest.approx(1, abs=0.001)


def test_without_the_profiler_the_rest_is_not_known():
    shares = shares_of(figures(window=None, sums={"data_seconds": 0.3, "data_cpu": 0.3}), own_delay=False)
    assert (shares.data, shares.unknown) == (pytest.approx(0.3), pytest.approx(0.7))


def test_the_profilers_own_time_is_taken_from_tiny_operations():
    slow = window(0.2, kinds={"products": 0.05}, tiny={"seconds": 0.15}, calls=TINY)
    assert shares_of(figures(window=slow), own_delay=False).products == pytest.approx(0.5, abs=0.02)


def test_amdahl():
    assert Bottleneck(kind="allocator", share=0.5).speedup == 2
    text = sentence(Bottleneck(kind="data-wait", share=0.75, place="train.py:9"), 0.04)
    assert text == (
        "data wait, 75% of a step of 40 ms: the program waits for its samples at train.py:9; "
        "--dataloader-workers auto, with --prefetch 4 (rule dataloader-workers) would make steps at most 4 times as "
        "fast"
    )


def test_rates_against_the_calibrated_ceiling():
    seen = window(0.1, kinds={"products": 0.1}, flops={"products": 8e9}, timed={"products": 0.1})
    found = diagnosis(figures(window=seen), ceilings=Ceilings(products={"fp32": 100.0, "bf16": 300.0}))
    assert rates(found.main.figures, NO_CEILINGS) == {"products": pytest.approx(80)}
    assert found.rates == {"products": pytest.approx(80), "of_ceiling": pytest.approx(0.8)}
    text = diagnosis_text(found, width=80, strong=str)
    assert text.startswith("nothing stands out: 100% of a step are matrix products at 80% of what this")
    assert "80 GFLOP/s, 80% of the ceiling" in text


def test_the_overhead_of_the_profiler():
    found = diagnosis(figures(profiled_seconds=0.2))
    assert overhead(found.processes[0]) == pytest.approx(0.1 / 1.2)


def test_what_other_programs_took_was_not_added_by_the_profiler():
    held_up = {"thread_cpu": 0.5, "thread_delay": 0.5}
    found = diagnosis(figures(sums=held_up, profiled_seconds=0.2, window=window(0.2, delay=0.15)))
    assert overhead(found.processes[0]) == pytest.approx(0)


def test_the_text_names_first_and_second_and_fits_its_width():
    slow = window(0.04, kinds={"products": 0.008}, tiny={"seconds": 0.032}, calls=TINY)
    found = diagnosis(figures(window=slow, sums={"data_seconds": 0.6, "data_cpu": 0.6}, loader_workers=0))
    text = diagnosis_text(found, width=80, strong=str)
    assert text.startswith("first bottleneck: decoding of samples, 60% of a step of 100 ms")
    assert "\nsecond: tiny operations, 32% of a step" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_program_without_steps():
    assert diagnosis_text(diagnosis(), width=80, strong=str).startswith("no step was seen")


@pytest.mark.parametrize("kind", CASES)
def test_json(kind):
    found = diagnosis(figures(**CASES[kind]))
    written = diagnosis_json(found, program=("a.py",), version="1", host="here")
    json_output.checked("diagnose", written)
    assert written["first"]["kind"] == kind


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"pid": 1}', "[" * 100_000])
def test_what_is_no_figures_is_not_read(text):
    assert read_figures(text) is None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"wall": NaN}', '{"cpu": 1e999}', f'{{"cpu": {"9" * 400}}}', "3"])
def test_what_is_no_sums_of_a_loaders_worker_is_left_out(text, tmp_path):
    (tmp_path / figures_name(FIGURES, 0, 7)).write_text(json.dumps(data(loader_workers=2)))
    (tmp_path / figures_name(FETCHES, 0, 8)).write_text(text)
    reader = FiguresReader(str(tmp_path))
    [found] = reader.read()
    assert (found.fetches, reader.ignored) == ({}, 1)


def test_hostile_figures_are_not_read():
    windows = [3, {}, window(0.1, kinds=[1]), window("much"), window(float("nan")), window(0.1, bytes={"x": [1, 1]})]
    windows += [window(0.1) | {"tiny": {"seconds": 0.1}}]
    wrong = [("busy_threads", [{"cpus": "x", "seconds": 1}]), ("where", 3), ("snapshot", None)]
    wrong += [("seconds", float("nan")), ("seconds", -1), ("sums", {"thread_cpu": float("inf")})]
    wrong += [("steps", 10**400), ("threads", -1), ("slowdowns", {"bf16": float("nan")}), ("profiled_seconds", -0.1)]
    for name, value in [*wrong, *(("window", each) for each in windows)]:
        assert read_figures(json.dumps(data(**{name: value}))) is None


def test_batches_that_may_fill_the_memory():
    given = figures(loader_workers=4, prefetched=2, batch_bytes=1 << 30)
    assert given.loader_bytes == 8 << 30
    found = diagnosis_of([given], {}, MACHINE, NO_CEILINGS, 16 << 30)
    assert found.remarks == (
        "batches loaded ahead may take 8 GiB of 16 GiB of memory (4 workers x prefetch 2 x 1 GiB): "
        "--prefetch 1 or fewer --dataloader-workers, before the kernel ends the program",
    )
    assert diagnosis_of([given], {}, MACHINE, NO_CEILINGS, 32 << 30).remarks == ()
    assert diagnosis_of([given], {}, MACHINE, NO_CEILINGS, None).remarks == ()


def test_one_number_read_in_a_small_step_is_no_synchronization():
    calls = {"tiny": 25, "forward": 3, "all": 25, "synchronization": 1}
    found = diagnosis(figures(step=1e-3, window=window(1e-3, tiny={"seconds": 9e-4}, calls=calls)))
    assert found.first.kind == "tiny-operations"


def test_a_training_without_modules_is_no_loop_over_elements():
    seen = window(0.1, tiny={"seconds": 0.09, "outside": 0.09}, calls=TINY | {"outside": 1000, "loss": 1000})
    assert diagnosis(figures(window=seen)).first.kind == "tiny-operations"
    in_loss = window(0.1, tiny={"seconds": 0.09, "outside": 0.09}, calls=TINY | {"outside": 900, "loss": 900})
    assert diagnosis(figures(window=in_loss)).first.kind == "python-loop"


def test_averages_of_weights_are_no_loss():
    seen = window(0.1, tiny={"seconds": 0.09, "outside": 0.09}, calls=TINY | {"outside": 900, "loss": 3})
    assert diagnosis(figures(window=seen)).first.kind == "tiny-operations"


def test_what_calls_few_operations_that_take_no_longer_than_that():
    calls = {"tiny": 1, "forward": 3, "all": 3}
    seen = window(1e-4, kinds={"products": 3e-5}, tiny={"seconds": 2e-5}, overhead=5e-5, calls=calls)
    found = diagnosis(figures(step=1e-4, window=seen))
    assert (found.first.kind, found.first.share) == ("tiny-operations", pytest.approx(0.7))


LOOPS = {
    "slices in a model": ({"accesses": 350}, "tiny-operations"),
    "elements in a model": ({"accesses": 500}, "python-loop"),
    "elements in a loss": ({"accesses": 150, "outside": 800, "outside_accesses": 150}, "python-loop"),
    "slices in a model, and a loss without": ({"accesses": 150, "outside": 800}, "tiny-operations"),
    "steps of a sequence without modules": (
        {"accesses": 200, "outside": 1000, "outside_accesses": 200},
        "tiny-operations",
    ),
    "pairs of points without modules": ({"accesses": 350, "outside": 1000, "outside_accesses": 350}, "python-loop"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_elements_is_told_from_a_model_that_takes_parts(name):
    calls, kind = LOOPS[name]
    assert diagnosis(figures(window=window(0.1, tiny={"seconds": 0.09}, calls=TINY | calls))).first.kind == kind


def test_a_loop_over_rows_that_are_not_tiny():
    calls = {"forward": 300, "all": 800, "outside": 290, "accesses": 128, "outside_accesses": 128, "tiny": 20}
    seen = window(0.1, kinds={"access": 0.08, "other": 0.01}, tiny={"seconds": 0.01, "outside": 0.01}, calls=calls)
    found = diagnosis(figures(window=seen))
    assert (found.first.kind, found.first.share) == ("python-loop", pytest.approx(0.9))


def test_memory_that_is_unmapped_between_operations_is_no_python_code():
    sums = {"thread_stime": 0.95, "thread_minflt": 100_000, "process_minflt": 200_000}
    found = diagnosis(figures(sums=sums, window=window(0.1, kinds={"other": 0.07}, pauses=0.03)))
    assert (found.first.kind, found.first.share, found.second) == ("allocator", pytest.approx(0.95), None)
    seen = window(0.1, kinds={"other": 0.06, "allocation": 0.03}, pauses=0.01)
    assert diagnosis(figures(sums=sums | {"thread_stime": 1.0}, window=seen)).first.share == 1
    computed = diagnosis(figures(window=window(0.1, kinds={"other": 0.07}, pauses=0.03)))
    assert (computed.first.kind, computed.first.share) == ("python-code", pytest.approx(0.3))


def test_moving_data_in_one_pass_is_no_bottleneck():
    found = diagnosis(figures(window=window(0.1, kinds={"other": 0.09, "products": 0.01}, chained=0.0)))
    assert found.first is None


def test_threads_of_python_that_compute_take_cpus_from_one_another():
    sums = {"thread_cpu": 0.3, "thread_delay": 0.7, "process_cpu": 2.0, "process_delay": 5.0}
    found = diagnosis(figures(sums=sums))
    assert (found.first.kind, found.first.detail, found.remarks) == ("oversubscribed", "7 on 2 CPUs", ())
    waits = diagnosis(figures(sums=sums | {"process_cpu": 1.0, "process_delay": 1.0}))
    assert (waits.first, waits.main.shares.others) == (None, pytest.approx(0.7))
    counted_long = diagnosis(figures(sums=sums | {"wall": 4.0}))  # Other threads run while counters are read.
    assert (counted_long.first, counted_long.main.shares.others) == (None, pytest.approx(0.7))


def threads(*, beside):
    """Two compute threads and six others, which read samples if `beside`; of all, four want to run at a time."""
    own = [{"seconds": 5.0, "delay": 5.0, "cpus": "0-1", "is_beside": False}] * 2
    others = [{"seconds": 1.5, "delay": 2.0, "cpus": "0-1", "is_beside": beside}] * 6
    sums = {"thread_cpu": 0.5, "thread_delay": 0.5, "process_cpu": 2.0, "process_delay": 2.1}
    return figures(sums=sums, busy_threads=[*own, *others])


def test_threads_that_read_samples_are_no_compute_threads():
    found = diagnosis(threads(beside=True))
    assert (found.first.kind, found.first.detail) == ("python-threads", "2 of torch's and 6 others on 2 CPUs")
    assert found.first.share == pytest.approx(0.5)
    computing = diagnosis(threads(beside=False))
    assert (computing.first.kind, computing.first.detail) == ("oversubscribed", "4 on 2 CPUs")
    many = diagnosis(threads(beside=True), limits=ProcessLimits(cpus=frozenset({0}), threads=1))
    assert (many.first.kind, many.first.detail) == ("oversubscribed", "4 on 1 CPU")


def test_threads_of_a_rank_that_move_data_are_no_compute_threads():
    sums = {"thread_cpu": 0.9, "process_cpu": 2.6, "collective_seconds": 0.1}
    assert diagnosis(figures(sums=sums, rank=0, world_size=2)).first is None


def crowded_rank(number, cpus):
    sums = {"thread_cpu": 0.4, "thread_delay": 0.4, "process_cpu": 0.4, "process_delay": 0.5, "collective_seconds": 0.2}
    return figures(rank=number, pid=number, world_size=2, threads=1, cpus=cpus, sums=sums)


def test_ranks_that_are_bound_to_the_same_cpu():
    found = diagnosis(crowded_rank(0, "0"), crowded_rank(1, "0"))
    assert (found.first.kind, found.first.detail, found.remarks) == ("wrong-binding", "1 of 2", ())
    assert found.first.share == pytest.approx(0.5)
    assert diagnosis(crowded_rank(0, "0"), crowded_rank(1, "0-1")).first is None


def test_waiting_beside_samples_that_are_decoded_is_no_python_code():
    sums = {"data_seconds": 0.3, "data_cpu": 0.3, "thread_cpu": 0.4}
    found = diagnosis(figures(sums=sums, loader_workers=0, window=window(0.07, kinds={"products": 0.01}, pauses=0.06)))
    assert (found.first.kind, found.second.kind) == ("waiting", "decode")
    assert found.main.shares.python == pytest.approx(0, abs=0.01)


def test_python_code_and_waiting_are_told_apart():
    seen = window(0.1, kinds={"products": 0.03}, pauses=0.07)
    found = diagnosis(figures(window=seen, sums={"thread_cpu": 0.6}))
    assert (found.first.kind, found.first.share) == ("waiting", pytest.approx(0.4))
    assert (found.second.kind, found.second.share) == ("python-code", pytest.approx(0.3))


def test_samples_taken_by_hand_between_long_computations():
    where = {
        "samples": 10,
        "doing": {"getitem": 3, "": 7},
        "places": [["", "train.py:9", 7], ["getitem", "train.py:3", 3]],
    }
    found = diagnosis(figures(window=window(0.1, kinds={"products": 0.07}, pauses=0.03), where=where))
    assert (found.first.kind, found.first.place, found.first.share) == ("decode", "train.py:3", pytest.approx(0.3))


def test_the_type_of_low_precision_that_is_used_is_judged():
    seen = window(0.1, kinds={"low products": 0.1}, low={"fp16": 0.1})
    slow = diagnosis(figures(window=seen, slowdowns={"bf16": 0.3, "fp16": 5.0}))
    assert (slow.first.kind, slow.first.detail) == ("low-precision", "fp16")
    assert diagnosis(figures(window=seen, slowdowns={"bf16": 9.0, "fp16": 1.0})).first is None


def test_busy_workers_of_a_loader_take_cpus_from_the_threads():
    loading = {"loader_workers": 4, "sums": {"thread_cpu": 0.6, "thread_delay": 0.4}}
    found = diagnosis(figures(**loading, fetches={"busy": 1.8, "cpu": 9.0, "seconds": 10.0}))
    assert (found.first.kind, found.first.share) == ("oversubscribed", pytest.approx(0.4))
    assert found.first.detail == "2 threads and 4 workers of a DataLoader on 2 CPUs"
    assert found.remarks == ()
    idle = diagnosis(figures(**loading, fetches={"busy": 0.1, "cpu": 1.0, "seconds": 10.0}))
    assert (idle.first, idle.main.shares.others) == (None, pytest.approx(0.4))


def test_of_a_cpu_that_is_short_the_program_is_to_blame_as_far_as_it_takes_it_itself():
    sums = {"thread_cpu": 0.2, "thread_delay": 0.8}
    found = diagnosis(figures(sums=sums, loader_workers=1, fetches={"busy": 1.0, "cpu": 9.0, "seconds": 10.0}))
    assert found.main.shares.others == pytest.approx(0.8 - 1 / 3)
    assert found.main.shares.delayed == pytest.approx(1 / 3 / (0.2 + 1 / 3))
    whole = diagnosis(figures(sums=sums, threads=32))
    assert (whole.main.shares.others, whole.main.shares.delayed) == (0, pytest.approx(0.8))


@pytest.mark.parametrize(("cpu", "kind"), [(2.5, "decode"), (0.3, "data-wait")])
def test_a_loaders_worker_that_has_no_cpu_decodes_all_the_same(cpu, kind):
    sums = {"data_seconds": 0.8, "data_cpu": 0.01, "thread_cpu": 0.2}
    fetches = {"cpu": cpu, "seconds": 10.0, "delay": 6.0}
    assert diagnosis(figures(sums=sums, loader_workers=1, fetches=fetches)).first.kind == kind


def test_computations_that_move_little_are_not_said_to_be_bound_by_memory():
    found = diagnosis(figures(window=window(0.1, kinds={"computing": 0.09, "products": 0.01})))
    assert found.first is None
    text = diagnosis_text(found, width=80, strong=str)
    assert text.startswith("nothing stands out: 10% of a step are matrix products, 90% other computations")


MOVED = {"20": [1e9, 0.001], "31": [4e9, 0.5], "32": [2e9, 0.1]}


def test_the_bandwidth_is_that_of_more_than_the_caches_hold():
    seen = window(0.1, kinds={"other": 0.1}, bytes=MOVED)
    found = diagnosis(figures(window=seen), ceilings=Ceilings(bandwidth=20.0, cache_bytes=1 << 28))
    assert found.rates == {"bandwidth": pytest.approx(10.0), "of_bandwidth": pytest.approx(0.5)}
    assert "10 GB/s, 50% of the bandwidth" in diagnosis_text(found, width=80, strong=str)
    assert rates(figures(window=seen), Ceilings(cache_bytes=1 << 31)) == {}
    assert rates(figures(), Ceilings(bandwidth=20.0)) == {}


def test_how_much_of_the_communication_is_hidden():
    seen = window(0.1, kinds={"products": 0.1}, communication={"seconds": 0.04, "hidden": 0.03})
    found = diagnosis(figures(window=seen, sums={"collective_seconds": 0.2}))
    assert found.rates == {"hidden": pytest.approx(0.75)}
    assert "75% of their time is hidden" in diagnosis_text(found, width=80, strong=str)
    without = window(0.1, communication={"seconds": 0.0, "hidden": 0.0})
    assert rates(figures(window=without), NO_CEILINGS) == {}


def test_processes_divide_the_machine_among_them():
    seen = window(0.1, kinds={"products": 0.1}, flops={"products": 2e9}, timed={"products": 0.1})
    ranks = [figures(rank=number, index=number, world_size=2, threads=1, window=seen) for number in (0, 1)]
    found = diagnosis(*ranks, ceilings=Ceilings(products={"fp32": 50.0}))
    assert found.rates == {"products": pytest.approx(20), "of_ceiling": pytest.approx(0.8)}


def test_no_rates_are_shown_where_other_programs_held_up_operations():
    seen = window(0.1, kinds={"products": 0.1}, flops={"products": 2e9}, timed={"products": 0.1})
    assert diagnosis(figures(window=seen)).rates != {}
    assert diagnosis(figures(window=seen, sums={"thread_cpu": 0.7, "thread_delay": 0.3})).rates == {}


def test_the_rates_are_those_of_the_process_that_is_shown():
    fast = window(0.1, kinds={"products": 0.1}, flops={"products": 4e9}, timed={"products": 0.1})
    slow = window(0.1, tiny={"seconds": 0.09}, calls=TINY, flops={"products": 1e9}, timed={"products": 0.1})
    found = diagnosis(figures(window=fast, cpus="0", threads=1), figures(window=slow, pid=8, cpus="1", threads=1))
    assert (found.first.kind, found.first.process) == ("tiny-operations", 1)
    assert found.rates["products"] == pytest.approx(10)


def test_a_program_that_ended_before_the_profilers_turn_is_told_what_to_do():
    found = diagnosis(figures(window=None, profiled_steps=0, seen_steps=12))
    text = diagnosis_text(found, width=250, strong=str)
    assert "as the program ended after 12 steps; it looks after --warm-up, half of --steps and half a second" in text


def test_a_bottleneck_that_takes_all_of_a_step():
    assert "at most 100 times as fast" in sentence(Bottleneck(kind="waiting", share=1.0), 0.04)


def test_figures_without_sense_give_no_error() -> None:
    """A process may write any figures, and a window may be nothing but an interruption."""
    huge = figures(sums={"process_cpu": 9e18, "process_delay": 9e18, "wall": 1.0})
    assert huge.wanted_cpus == 0.0
