#!/usr/bin/env python3
"""Run small models of many architectures, one after the other, and write what became of each to a file.

scripts/bench/architectures runs it under plain python with --mode plain, which stores weights and results, and under
cpulaunch with --mode captured, which compares the results of every call with the stored ones. Models whose results
differ run once more with --mode exact, which judges them by fp64. A line is written before each model, so that the one
on which a process died is known.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sweep.forcing import use_every_capture
from sweep.judgement import wrong_reason
from sweep.models import CALLS, UnbuildableError, build, first_line, inputs_of, tensors_in
from sweep.outcomes import Outcome, kind_of
from torch import Tensor, nn

SETTLE_SECONDS = 2.5
"""A model without new events for so long has found its final state."""

LEAST_PAUSE, PAUSES_FOR_CALL = 0.02, 4
"""Seconds between two calls, and how many times as long as a call: the work in the background takes idle CPUs."""

POSTPONED = "the program holds the memory of its weights"
"""Beginning of a reason that is not final: the capture is tried again, and another thread may have held it."""

EVENTS = os.environ.get("CPULAUNCH_EVENTS")
"""The file of events that cpulaunch --report gives its workers."""


class Events:
    """The events that this process has reported since the last model."""

    def __init__(self) -> None:
        self.offset = os.path.getsize(EVENTS) if EVENTS else 0
        self.seen: list[dict[str, Any]] = []

    def update(self) -> bool:
        """Whether there are new events. Effect: adds them to those seen."""
        if EVENTS is None:
            return False
        with open(EVENTS, "rb") as file:
            file.seek(self.offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self.offset += len(complete)
        new = [json.loads(line) for line in complete.splitlines()]
        self.seen += [
            event
            for event in new
            if event.get("event") in ("captured", "eager") and not str(event.get("reason")).startswith(POSTPONED)
        ]
        return bool(new)


def call(
    model: nn.Module, number: int, options: argparse.Namespace, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The tensors of the result of the call `number`."""
    values = inputs_of(options.library, model, number, cache=options.cache == "on")
    values = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in values.items()
    }
    torch.manual_seed(number)
    return tensors_in(model(**values))


def run_plain(name: str, options: argparse.Namespace) -> Outcome:
    """Effect: stores weights and results of a model. Raises: UnbuildableError."""
    model = build(options.library, name)
    state = copy.deepcopy(model.state_dict())
    try:
        plain = [call(model, number, options) for number in range(CALLS)]
        again = call(model, 0, options)
    except Exception as error:
        raise UnbuildableError(f"fails under plain python: {first_line(error)}") from error
    if not plain[0] or wrong_reason(again, plain[0], None):
        raise UnbuildableError("its results under plain python differ from call to call")
    torch.save({"state": state, "plain": plain}, options.folder / f"{name}.pt")
    return Outcome(name=name, kind="eager", calls=CALLS)


def run_captured(name: str, options: argparse.Namespace) -> Outcome:
    """What became of a model; every result of its calls is compared. Raises: UnbuildableError, any error of a call.

    Effect: stores the first result that differs from plain python's, for --mode exact.
    """
    stored, model = _stored_model(name, options)
    outer, events, calls = type(model).__name__, Events(), 0
    differs = ""
    for number in _calls_until_settled(events, outer, options.wait_seconds):
        results = call(model, number, options)
        calls += 1
        reason = None if differs else wrong_reason(results, stored["plain"][number], None)
        if reason:
            differs = f"call {calls}: {reason}"
            torch.save((number, results), options.folder / f"{name}.other.pt")
    kind, reason = kind_of(events.seen, outer)
    if differs:
        return Outcome(name=name, kind="wrong", reason=f"{differs}; {reason}".rstrip("; "), calls=calls, otherwise=kind)
    return Outcome(name=name, kind=kind, reason=reason, calls=calls)


def run_exact(name: str, options: argparse.Namespace) -> Outcome:
    """Whether a result that differs is right, by fp64; `kind` is "wrong" or "eager". Raises: any error of the model."""
    stored, model = _stored_model(name, options)
    number, results = torch.load(options.folder / f"{name}.other.pt")
    exact = call(model.double(), number, options, torch.float64)
    reason = wrong_reason(results, stored["plain"][number], exact)
    return Outcome(name=name, kind="wrong" if reason else "eager", reason=reason or "")


def _stored_model(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], nn.Module]:
    """What --mode plain has stored, and the model with the stored weights. Raises: UnbuildableError."""
    stored = torch.load(options.folder / f"{name}.pt")
    model = build(options.library, name)
    model.load_state_dict(stored["state"], strict=False)
    return stored, model


def _calls_until_settled(events: Events, outer: str, wait_seconds: float) -> Any:
    """Yields numbers of inputs until the capture of a model has settled, and once more after that."""
    started = last = time.monotonic()
    count = 0
    while True:
        called = time.monotonic()
        yield count % CALLS
        count += 1
        now = time.monotonic()
        last = now if events.update() else last
        whole = any(event["event"] == "captured" and event["module"] == outer for event in events.seen)
        settled = events.seen and (whole or now - last > SETTLE_SECONDS)
        if count >= CALLS and (settled or now - started > wait_seconds):
            break
        time.sleep(max(LEAST_PAUSE, PAUSES_FOR_CALL * (now - called)) if count >= CALLS else 0)
    yield from range(CALLS)


def run_all(run: Callable[[str, argparse.Namespace], Outcome], options: argparse.Namespace) -> None:
    """Effect: runs each model and writes a line before and after it."""
    for name in options.names:
        _write(options.results, {"start": name})
        try:
            outcome = run(name, options)
        except UnbuildableError as error:
            outcome = Outcome(name=name, kind="not built", reason=str(error))
        except Exception as error:  # noqa: BLE001  The sweep goes on with the next model.
            outcome = Outcome(name=name, kind="failed", reason=first_line(error))
        _write(options.results, asdict(outcome))


def _write(file: Path, entry: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(entry) + "\n")


MODES = {"plain": run_plain, "captured": run_captured, "exact": run_exact}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--library", choices=("transformers", "timm"), default="transformers")
    parser.add_argument("--mode", choices=tuple(MODES), required=True)
    parser.add_argument("--every-capture", action="store_true", help="use captures that are slower too")
    parser.add_argument("--cache", choices=("on", "off"), default="off", help="use_cache of models that have it")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the stored weights and results")
    parser.add_argument("--results", type=Path, required=True, help="file to which a line is added for each model")
    parser.add_argument("--wait-seconds", type=float, default=60.0, help="limit for a model to be captured")
    options = parser.parse_args()
    if options.every_capture and options.mode == "captured":
        use_every_capture()
    with torch.no_grad():
        run_all(MODES[options.mode], options)


if __name__ == "__main__":
    main()
