"""Optimization levels: one number that stands for several settings, chosen for this host, as a layer of a request."""

from __future__ import annotations

from cpulaunch.records.record import replace
from cpulaunch.records.request import Layer
from cpulaunch.records.settings import setting_specs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from cpulaunch.records.host import Host

SETTING = "optimize"
_NO_PRELOADS = {"openmp": "default", "allocator": "default", "mkl_dispatch": "off"}
_ROUNDING = {"graph": "onednn", "weights": "fp32", "channels_last": True}
_BF16_WEIGHTS = _ROUNDING | {"weights": "bf16"}
_BF16 = _BF16_WEIGHTS | {"precision": "bf16"}
_WITHOUT_SETTINGS = (
    "CPU binding, memory and threads only: nothing is preloaded, no profile is added automatically",
    "the default: adds nothing that changes what is computed",
)
"""What levels 0 and 1 mean, in a few words."""
_EFFECTS: tuple[tuple[set[tuple[str, str]], str], ...] = (
    ({("precision", "bf16"), ("weights", "bf16")}, "products and weights have 8 bits of precision"),
    ({("precision", "bf16"), ("weights", "int8")}, "products and weights have 8 bits of precision"),
    ({("precision", "bf16")}, "products have 8 bits of precision"),
    ({("weights", "bf16")}, "weights have 8 bits of precision"),
    ({("weights", "int8")}, "weights have 8 bits"),
    (set(), "results differ by rounding"),
)
"""What settings of the higher levels change in the numbers; the first entry whose settings are all chosen holds."""


def level_values(level: int, host: Host) -> Mapping[str, Any]:
    """The settings that a level (0 to 4) stands for on this host, in the order of the help."""
    if level < 2:
        return _NO_PRELOADS if level == 0 else {}
    values = _ROUNDING
    if level > 2 and host.cpu.has_bf16:
        values = _BF16 if host.cpu.multiplies_bf16_faster else _BF16_WEIGHTS
    return values | {"weights": "int8"} if level == 4 else values


def _missing_bf16(host: Host) -> str | None:
    """What bf16 is not used for on this host, and why; None if it pays."""
    if not host.cpu.isa:
        return "no bf16: it is not known whether this CPU has bf16 instructions"
    if not host.cpu.has_bf16:
        return "no bf16: this CPU has no bf16 instructions (avx512_bf16, amx_bf16, Arm's bf16)"
    if not host.cpu.multiplies_bf16_faster:
        return "no products in bf16: without AMX they are slower than fp32 on this CPU"
    return None


def with_level(layers: Sequence[Layer], host: Host) -> tuple[tuple[Layer, ...], str | None]:
    """The layers with one for the chosen level, and the names of their profiles (None: no profile).

    The level goes below everything that the user named and above what is added automatically. Level 0 removes the
    automatic profiles. An automatic profile's own level goes directly below that profile.
    """
    position = next((index for index, layer in enumerate(layers) if SETTING in layer.values), None)
    if position is None:
        return tuple(layers), profile_names(layers)
    chooser = layers[position]
    level: int = chooser.values[SETTING]
    kept = [layer for layer in layers if level > 0 or not layer.automatic or layer is chooser]
    kept[kept.index(chooser)] = _explained(chooser, level, host, kept)
    values = level_values(level, host)
    own = Layer(
        origin=f"{chooser.origin} -O{level}",
        values=values,
        reasons=dict.fromkeys(values, "level 0 preloads nothing") if level == 0 else {},
    )
    named = [layer for layer in kept if not _below_level(layer)]
    split = max(len(named), position + 1)
    return (*kept[:split], own, *kept[split:]), profile_names(kept)


def _below_level(layer: Layer) -> bool:
    return layer.automatic or layer.origin == "default"


def profile_names(layers: Sequence[Layer]) -> str | None:
    """The names of the profiles among the layers, for the plan; None: no profile."""
    names = [layer.origin.removeprefix("profile:") for layer in layers if layer.origin.startswith("profile:")]
    return ",".join(names) or None


def _explained(chooser: Layer, level: int, host: Host, layers: Sequence[Layer]) -> Layer:
    """The layer that chose the level, with what the level means here as the reason of that choice."""
    own = chooser.reasons.get(SETTING)
    reason = "; ".join(filter(None, (own, _meaning(level, host, layers))))
    return replace(chooser, reasons={**chooser.reasons, SETTING: reason})


def _meaning(level: int, host: Host, layers: Sequence[Layer]) -> str:
    """One line: the options that the level stands for on this host, what they change, and which others win."""
    values = level_values(level, host)
    named = [layer for layer in layers if not _below_level(layer)]
    winners = {name: layer.origin for layer in reversed(named) for name in values if name in layer.values}
    left = {name: value for name, value in values.items() if name not in winners}
    parts = [_WITHOUT_SETTINGS[level] if level < 2 else _effect(left)]
    if level > 2 and (missing := _missing_bf16(host)) is not None:
        parts.append(missing)
    if winners:
        parts.append("chosen otherwise: " + ", ".join(f"{name} [{origin}]" for name, origin in winners.items()))
    return "; ".join(parts)


def _effect(values: Mapping[str, Any]) -> str:
    """The options, and what they change in the numbers."""
    if not values:
        return "adds nothing"
    return f"{_options(values)}: {next(text for chosen, text in _EFFECTS if chosen <= set(values.items()))}"


def _options(values: Mapping[str, Any]) -> str:
    specs = setting_specs()
    return ", ".join(" ".join(specs[name].arguments(value)) for name, value in values.items())
