"""The variants under which scripts/bench/programs and scripts/bench/generation run a program."""

from __future__ import annotations

from collections.abc import Mapping

from peers import PEERS, Recipe, with_flags

BASE = "environment"
"""The variant that changes nothing inside torch: what a setting inside torch must not be slower than."""

CONTROL = "control"
"""`BASE` once more: its ratio shows what this machine's noise makes of two equal settings."""

GRAPH, BF16 = ("--graph", "onednn"), ("--precision", "bf16")

VARIANTS: Mapping[str, Recipe] = {
    "python": PEERS["python"],
    BASE: PEERS["cpulaunch-1"],
    CONTROL: PEERS["cpulaunch-1"],
    "graph": with_flags(*GRAPH),
    "bf16": with_flags(*BF16),
    "graph+bf16": with_flags(*GRAPH, *BF16),
    "int8": with_flags("--weights", "int8"),
    "int4": with_flags("--weights", "int4"),
    "bf16-weights": with_flags("--weights", "bf16"),
    "O2": with_flags("-O2"),
    "O3": with_flags("-O3"),
    "O4": with_flags("-O4"),
}
"""Name -> recipe."""

DEFAULT_VARIANTS = tuple(name for name in VARIANTS if name not in (CONTROL, "int4", "bf16-weights"))
