"""Figures of which some numbers are absurd: they are not read, or make a diagnosis that can be shown."""

import json
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpulaunch.html.diagnose_page import diagnose_page
from cpulaunch.measure.diagnosis.bottlenecks import ProcessLimits
from cpulaunch.measure.diagnosis.diagnosis import diagnosis_of
from cpulaunch.measure.diagnosis.diagnosis_json import diagnosis_json
from cpulaunch.measure.diagnosis.diagnosis_text import LABELS, diagnosis_text
from cpulaunch.measure.diagnosis.figures import read_figures
from cpulaunch.measure.diagnosis.folder import FiguresReader
from cpulaunch.measure.diagnosis.rates import Ceilings
from cpulaunch.records.torch_settings import FETCHES, FIGURES, figures_name
from tests.measure.diagnosis.given import data, window

MACHINE = ProcessLimits(cpus=frozenset({0, 1}), threads=2, nodes={0: 0, 1: 1}, remote_slowdown=2.0)
CEILINGS = Ceilings(products={"fp32": 100.0}, bandwidth=50.0, cache_bytes=1 << 20)
KINDS = ("products", "low products", "other", "computing", "access", "allocation", "collective", "synchronization")
VALUES = (0, 1, -1, 1e-300, 5e-324, 1e300, -1e300, -1e9, 1e-9, 1e18, 10**300, 2**63 - 1, True, "\x1b[31m", None, [], {})


def whole(index=0):
    """Figures in which everything that there may be is."""
    seen = window(
        0.1,
        kinds=dict.fromkeys(KINDS, 0.01),
        part=1.0,
        delay=0.01,
        backward_waits=0.01,
        chained=0.01,
        flops={"products": 1e9},
        timed={"products": 0.05},
        low={"bf16": 0.03},
        communication={"seconds": 0.1, "hidden": 0.05},
        bytes={"30": [1e9, 0.1]},
    )
    return data(
        index=index,
        pid=7 + index,
        rank=index,
        world_size=2,
        sums=dict.fromkeys(("collective_cpu", "data_cpu", "thread_delay", "process_cpu", "wall", "rss"), 0.2),
        window=seen,
        slowdowns={"bf16": 3.0},
        busy_threads=[{"seconds": 1.0, "cpus": "0-1", "is_beside": True, "delay": 0.1}],
        loader_workers=2,
        prefetched=2,
        batch_bytes=1000,
        fetches={"busy": 0.5, "cpu": 0.5, "seconds": 1.0},
    )


def places(found):
    """Each place of a JSON value, as its container and the key there."""
    for key in found if isinstance(found, dict) else range(len(found)):
        yield found, key
        if isinstance(found[key], dict | list):
            yield from places(found[key])


PLACES = len(list(places(whole())))
CHANGES = st.lists(st.tuples(st.integers(0, PLACES - 1), st.sampled_from(VALUES)), min_size=1, max_size=6)
WAITS = next(place for place, (_, key) in enumerate(places(whole())) if key == "backward_waits")
CPUS = next(place for place, (_, key) in enumerate(places(whole())) if key == "cpus")


@given(changes=CHANGES)
@example(changes=[(WAITS, -1e9)])
@example(changes=[(WAITS, -1e300)])
@example(changes=[(CPUS, [])])
def test_absurd_values_make_no_absurd_diagnosis(changes):
    changed = whole()
    of_all = list(places(changed))
    for place, value in changes:
        container, key = of_all[place]
        container[key] = value
    for others in ([], [whole(index=1)]):
        read = [read_figures(json.dumps(each)) for each in (changed, *others)]
        for limits in (MACHINE, ProcessLimits()):
            check([each for each in read if each is not None], limits)


def check(figures, limits):
    """Raises: AssertionError, or anything else, if there is no text, JSON data or page of the diagnosis."""
    found = diagnosis_of(figures, {}, limits, CEILINGS, 1 << 34)
    text = diagnosis_text(found, width=80, strong=str)
    assert len(text) < 10_000
    assert all(character.isprintable() or character == "\n" for character in text)
    shown = diagnosis_json(found, program=("a.py",), version="1", host="here")
    json.dumps(shown, allow_nan=False)
    for process in shown["processes"]:
        assert all(0 <= share <= 1.01 for share in process["shares"].values())
    if found.processes:
        diagnose_page(shown, machine="here", labels=LABELS)


@pytest.mark.parametrize("bits", ["0", "64", "-1", str(1 << 62), "9" * 5000])
def test_absurd_sizes_of_what_is_moved_take_no_memory(bits):
    read = read_figures(json.dumps(data(window=window(0.1, bytes={bits: [1e9, 0.1]}))))
    check([] if read is None else [read], MACHINE)


def test_absurd_figures_of_loaders_do_not_add_up_to_infinity(tmp_path):
    (tmp_path / figures_name(FIGURES, 0, 7)).write_text(json.dumps(data(loader_workers=2)))
    for pid in (8, 9):
        (tmp_path / figures_name(FETCHES, 0, pid)).write_text('{"seconds": 1.7e308, "delay": 1.7e308}')
    [found] = FiguresReader(str(tmp_path)).read()
    json.dumps(found.fetches, allow_nan=False)


def peak_bytes(call):
    """The most memory that Python's objects take during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seconds", [1e-13, 1.0])
def test_threads_that_may_use_all_cpus_take_no_memory(seconds):
    threads = [{"seconds": seconds, "cpus": f"{number}-16384"} for number in range(40)]
    text = json.dumps(data(busy_threads=threads * (100 if seconds < 1 else 1)))
    assert peak_bytes(lambda: read_figures(text)) < 8 << 20


def test_processes_that_may_use_all_cpus_take_no_memory():
    threads = [{"seconds": 1.0, "cpus": "0-16384"}]
    texts = [json.dumps(data(pid=pid, index=pid, rank=pid, world_size=50, busy_threads=threads)) for pid in range(50)]

    def diagnose():
        found = diagnosis_of([read_figures(text) for text in texts], {}, MACHINE, CEILINGS, 1 << 34)
        assert len(found.processes) == 50

    assert peak_bytes(diagnose) < 8 << 20


def test_many_threads_that_are_equally_busy_are_busy():
    threads = [{"seconds": 1.0, "cpus": str(number)} for number in range(64)]
    found = read_figures(json.dumps(data(busy_threads=threads) | {"cpus": [0]}))
    assert found is not None
    assert found.busy_cpus.bit_count() == 64
    beside = [{"seconds": 10.0, "cpus": "0"}, *({**thread, "seconds": 0.3} for thread in threads)]
    found = read_figures(json.dumps(data(busy_threads=beside) | {"cpus": [0]}))
    assert found is not None
    assert found.busy_cpus == 1


def test_a_cpu_that_no_kernel_has_is_malformed():
    assert read_figures(json.dumps(data() | {"cpus": [16384]})) is not None
    assert read_figures(json.dumps(data() | {"cpus": [1 << 62]})) is None
