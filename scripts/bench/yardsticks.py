"""What results are held against: eager fp32's outputs, the operations a sample costs, the machine's matrix products."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commands import BenchError, Command, Peer, run_peer
from interleave import spread
from peers import PEERS, Scene
from rates import Samples, format_cells, parse_figures

HERE = Path(__file__).parent
CEILING_PEERS = ("python", "cpulaunch-1")
"""Both, because on some machines MKL needs cpulaunch's help to reach what the machine can do."""

Errors = Mapping[str, Mapping[str, float]]
"""Model -> peer -> largest absolute difference of an output from eager fp32's, over all rounds and copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """Of one model: the file with eager fp32's outputs, their root mean square, and 1e9 operations a sample."""

    file: Path
    rms: float
    gflop: float


def measure_yardstick(model: str, folder: Path) -> Yardstick:
    """Raises: BenchError. Effect: writes the model's reference outputs into `folder`."""
    file = folder / f"{model}.pt"
    argv = (sys.executable, str(HERE / "infer.py"), model, "--describe", str(file))
    output = run_peer(Peer(commands=(Command(argv=argv),), copies=1))
    figures = {unit: dict(parse_figures(output, unit)) for unit in ("rms", "GFLOP/sample")}
    if not all(model in by_name for by_name in figures.values()):
        raise BenchError(f"no description of {model}:\n{output}")
    return Yardstick(file=file, rms=figures["rms"][model], gflop=figures["GFLOP/sample"][model])


def measure_ceilings(scene: Scene, seconds: float) -> dict[str, float]:
    """Precision -> GFLOP/s of the fastest matrix product, each tried for `seconds`. Raises: BenchError."""
    program = [str(HERE / "ceiling.py"), "--seconds", str(seconds)]
    ceilings: dict[str, float] = {}
    for name in CEILING_PEERS:
        for precision, rate in parse_figures(run_peer(PEERS[name].launch(program, scene)), "GFLOP/s"):
            ceilings[precision] = max(rate, ceilings.get(precision, 0))
    return ceilings


def shares(
    samples: Samples, yardsticks: Mapping[str, Yardstick], ceilings: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Model -> peer -> median rate as a share of what the machine's matrix products in its precision allow."""
    return {
        model: {
            peer: spread(rates).median * yardsticks[model].gflop / ceilings[PEERS[peer].precision]
            for peer, rates in by_peer.items()
        }
        for model, by_peer in samples.items()
    }


def format_errors(errors: Errors, yardsticks: Mapping[str, Yardstick]) -> str:
    cells = {
        model: {peer: f"{error:.1e}" for peer, error in by_peer.items()} for model, by_peer in errors.items() if by_peer
    }
    columns = {model: f" (rms {yardstick.rms:.2g})" for model, yardstick in yardsticks.items()}
    return format_cells("largest error against eager fp32", cells, columns)


def format_shares(shared: Mapping[str, Mapping[str, float]], ceilings: Mapping[str, float]) -> str:
    cells = {model: {peer: f"{share:.1%}" for peer, share in by_peer.items()} for model, by_peer in shared.items()}
    measured = ", ".join(f"{precision} {rate:,.0f} GFLOP/s" for precision, rate in ceilings.items())
    return format_cells(f"share of the matrix-product ceiling ({measured})", cells)
