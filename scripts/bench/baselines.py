"""Baselines of results: outputs of eager fp32, operations per sample, and the machine's matrix-product rate."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commands import BenchError, Command, Peer, run_peer
from interleave import spread
from peers import PEERS, BenchContext
from rates import Samples, format_cells, parse_figures

HERE = Path(__file__).parent
CEILING_PEERS = ("python", "cpulaunch-1")
"""Two peers, because on some machines MKL reaches the full rate only with the settings of cpulaunch."""

Errors = Mapping[str, Mapping[str, float]]
"""Model -> peer -> largest absolute difference of an output from that of eager fp32, over all rounds and copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """File with the eager fp32 outputs of a model, their root mean square, and 1e9 operations per sample."""

    file: Path
    rms: float
    gflop: float


def measure_baseline(model: str, folder: Path) -> Baseline:
    """The baseline of a model. Effect: writes its reference outputs into `folder`. Raises: BenchError."""
    file = folder / f"{model}.pt"
    argv = (sys.executable, str(HERE / "infer.py"), model, "--describe", str(file))
    output = run_peer(Peer(commands=(Command(argv=argv),), copies=1))
    figures = {unit: dict(parse_figures(output, unit)) for unit in ("rms", "GFLOP/sample")}
    if not all(model in by_name for by_name in figures.values()):
        raise BenchError(f"infer.py did not describe {model}:\n{output}")
    return Baseline(file=file, rms=figures["rms"][model], gflop=figures["GFLOP/sample"][model])


def measure_ceilings(context: BenchContext, seconds: float) -> dict[str, float]:
    """Precision -> GFLOP/s of the fastest matrix product, each size measured for `seconds`. Raises: BenchError."""
    program = [str(HERE / "ceiling.py"), "--seconds", str(seconds)]
    ceilings: dict[str, float] = {}
    for name in CEILING_PEERS:
        for precision, rate in parse_figures(run_peer(PEERS[name].launch(program, context)), "GFLOP/s"):
            ceilings[precision] = max(rate, ceilings.get(precision, 0))
    return ceilings


def shares(
    samples: Samples, baselines: Mapping[str, Baseline], ceilings: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Model -> peer -> median rate as a share of the machine's matrix-product rate in the precision of the peer."""
    return {
        model: {
            peer: spread(rates).median * baselines[model].gflop / ceilings[PEERS[peer].precision]
            for peer, rates in by_peer.items()
        }
        for model, by_peer in samples.items()
    }


def format_errors(errors: Errors, baselines: Mapping[str, Baseline]) -> str:
    cells = {
        model: {peer: f"{error:.1e}" for peer, error in by_peer.items()} for model, by_peer in errors.items() if by_peer
    }
    columns = {model: f" (rms {baseline.rms:.2g})" for model, baseline in baselines.items()}
    return format_cells("largest error against eager fp32", cells, columns)


def format_shares(shared: Mapping[str, Mapping[str, float]], ceilings: Mapping[str, float]) -> str:
    cells = {model: {peer: f"{share:.1%}" for peer, share in by_peer.items()} for model, by_peer in shared.items()}
    measured = ", ".join(f"{precision} {rate:,.0f} GFLOP/s" for precision, rate in ceilings.items())
    return format_cells(f"share of the matrix-product ceiling ({measured})", cells)
