"""Events on modes, weights and captures -> the fields of the report, and the lines at the end."""

import ast
import json
import time
from pathlib import Path

import pytest

import cpulaunch.worker
from cpulaunch.launch.monitor.worker_report import WorkerReport, read_worker_report
from cpulaunch.launch.supervision.module_report import (
    CHOSEN_FIELDS,
    MAX_KEPT,
    MAX_KINDS,
    MAX_MODES,
    WEIGHTS_FIELDS,
    chosen_report,
    graph_report,
    module_lines,
    weights_report,
)


def told(*events):
    return read_worker_report([json.dumps({"pid": 10, **event}) + "\n" for event in events])


def chosen(module, mode, speedup, signature="f32[1]", **more):
    facts = {"module": module, "signature": signature, "mode": mode, "speedup": speedup, "samples": {"plain": 3}}
    return {"event": "chosen", **facts, **more}


def weights(**more):
    facts = {"module": "Net", "type": "int8", "layers": 2, "kinds": {"int8": 2}, "bytes_after": 100, "kept": []}
    return {"event": "weights", **facts, **more}


def accuracy(**more):
    return {"event": "accuracy", "module": "Net", "type": "int8", **more}


def test_the_last_choice_for_a_signature_counts():
    report = told(
        chosen("Net", "plain", 1.0),
        chosen("Net", "graph", 1.5, "f32[2]"),
        chosen("Net", "weights", 1.2, pid=11, undocumented=3),
    )
    assert chosen_report(report) == [
        {"module": "Net", "signature": "f32[1]", "mode": "weights", "speedup": 1.2, "samples": {"plain": 3}},
        {"module": "Net", "signature": "f32[2]", "mode": "graph", "speedup": 1.5, "samples": {"plain": 3}},
    ]


def test_the_events_of_a_process_on_one_module_are_merged():
    report = told(
        weights(layer_error_max=0.01, layer_error_rms=0.004, kept=["[8, 8]: bf16"]),
        weights(
            layers=1, kinds={"bf16": 1}, bytes_after=30, layer_error_max=0.005, undocumented=1, kept=["[4, 8]: bf16"]
        ),
        accuracy(error_max=0.2, error_rms=0.01, argmax_agreement=1.0),
        accuracy(error_max=0.1, error_rms=0.02, argmax_agreement=0.9),
    )
    (entry,) = weights_report(report)
    assert entry == dict.fromkeys(WEIGHTS_FIELDS) | {
        "module": "Net",
        "type": "int8",
        "layers": 3,
        "kinds": {"int8": 2, "bf16": 1},
        "bytes_after": 130,
        "layer_error_max": 0.01,
        "layer_error_rms": 0.004,
        "error_max": 0.2,
        "error_rms": 0.02,
        "argmax_agreement": 0.9,
        "kept": ["[8, 8]: bf16", "[4, 8]: bf16"],
    }


def test_processes_that_say_the_same_are_listed_once():
    report = told(weights(), weights(pid=11), weights(pid=12, layers=5))
    assert [entry["layers"] for entry in weights_report(report)] == [2, 5]


def test_the_list_of_layers_kept_is_bounded():
    (entry,) = weights_report(told(*[weights(kept=[f"[{number}, 8]: bf16"] * 8) for number in range(1000)]))
    assert (entry["layers"], len(entry["kept"])) == (2000, MAX_KEPT)


def test_events_with_many_kinds_or_facts_do_not_slow_down_those_that_follow():
    """Else a file of 16 MiB, which any process may have written, takes minutes."""
    names = {f"k{number}": 1 for number in range(30_000)}
    report = told(weights(kinds=names, **names), *[weights()] * 2000)
    began = time.process_time()
    (entry,) = weights_report(report)
    assert time.process_time() - began < 1
    assert (len(entry["kinds"]), entry["layers"], entry.keys()) == (MAX_KINDS, 4002, {*WEIGHTS_FIELDS})


def test_bytes_before_and_after_are_kept():
    (entry,) = weights_report(told(weights(bytes_before=400, bytes_after=100)))
    assert (entry["bytes_before"], entry["bytes_after"]) == (400, 100)


def test_the_last_word_of_each_process_on_captures_counts():
    events = [{"event": "captures", "seconds": seconds, "budget": 60.0, "pid": pid} for seconds, pid in PAIRS]
    report = graph_report(told(*events))
    assert (report["seconds"], report["budget_seconds"]) == (5.5, 60.0)


def test_unknown_seconds_are_null():
    report = graph_report(told({"event": "captures", "seconds": None, "budget": "60"}))
    assert (report["seconds"], report["budget_seconds"]) == (None, None)


PAIRS = ((1.0, 10), (4.5, 10), (1.0, 11))


def test_without_events_there_is_nothing_to_say():
    empty = WorkerReport()
    assert chosen_report(empty) == weights_report(empty) == []
    assert module_lines([empty]) == ()
    assert graph_report(empty)["seconds"] is None


@pytest.mark.parametrize(
    ("events", "lines"),
    [
        ([chosen("A", "plain", 1.0)], ("modules: 1 plain",)),
        (
            [chosen("A", "graph", 1.5), chosen("B", "graph", 2.25), chosen("C", "plain", 1.0)],
            ("modules: 2 graph (1.50-2.25 times plain), 1 plain",),
        ),
        ([chosen("A", "weights", 1.5), weights()], ("modules: 1 weights (1.50 times plain)", "weights: 2 in int8")),
        ([chosen("A", "graph", None)], ("modules: 1 graph",)),
    ],
)
def test_the_lines_at_the_end(events, lines):
    assert module_lines([told(*events)]) == lines


@pytest.mark.parametrize("word", ["gr\naph", "\x1b[31mgraph", "\ud800", "x" * 10_000])
def test_odd_words_stay_in_short_printable_lines(word):
    for line in module_lines([told(chosen("A", word, 2.0), weights(kinds={word: 1}))]):
        assert line.isprintable()
        assert len(line) < 150


def test_the_lines_add_up_the_workers():
    one = told(chosen("A", "graph", 1.5), weights())
    assert module_lines([one, one]) == ("modules: 2 graph (1.50 times plain)", "weights: 4 in int8")


def test_documented_fields_are_complete():
    assert set(chosen_report(told(chosen("A", "graph", 1.0)))[0]) == set(CHOSEN_FIELDS)


REPORTING = ("report_event", "_report_named")


def reported_events():
    """Every kind of event that the worker's code reports, with the names of its facts."""
    for path in Path(cpulaunch.worker.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in REPORTING and node.args:
                kind = node.args[0]
                if path.name == "events.py" and isinstance(kind, ast.Name):
                    continue  # It passes on the kind that it is called with.
                yield path.name, kind.value if isinstance(kind, ast.Constant) else None, {k.arg for k in node.keywords}


@pytest.mark.parametrize(
    ("kinds", "documented"),
    [
        (("chosen",), {*CHOSEN_FIELDS}),
        (("weights", "accuracy"), {*WEIGHTS_FIELDS}),
        (("captures",), {"seconds", "budget"}),
    ],
)
def test_no_fact_of_a_workers_event_is_lost(kinds, documented):
    found = {(name, fact) for name, kind, facts in reported_events() if kind in kinds for fact in facts if fact}
    assert {(name, fact) for name, fact in found if fact not in documented} == set()


def test_every_kind_of_event_of_the_worker_is_known():
    known = {"applied", "degraded", "captured", "eager", "warning", "metric", "checksum", "live"}
    known |= {"chosen", "weights", "accuracy", "captures", "conditions"}
    assert {kind for _, kind, _ in reported_events()} <= known


def test_of_many_modes_the_first_are_shown():
    """Any process may write events: without a limit, thousands of modes would be one line."""
    (line,) = module_lines([told(*(chosen(f"M{number}", f"mode{number}", 2.0) for number in range(MAX_MODES + 5)))])
    assert line.endswith(f"1 mode{MAX_MODES - 1} (2.00 times plain), and 5 more modes")
