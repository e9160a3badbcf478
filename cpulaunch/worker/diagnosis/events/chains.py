"""How much of moving data could be spared: chains of element-wise operations that fuse into one, and copies. Pure."""

from __future__ import annotations

from cpulaunch.worker.diagnosis.events.moved_bytes import ELEMENTWISE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

LEAST_LINKS = 3
"""A sum before a norm is what every model has; from three on it is a chain."""
COPIES = ("clone", "contiguous", "copy", "cat", "stack", "repeat", "repeat_interleave", "to", "_to_copy", "tile")
FUSIBLE = (
    *("sigmoid", "tanh", "exp", "expm1", "log", "log1p", "log2", "pow", "erf", "sin", "cos", "sign", "floor", "round"),
    *("gelu", "silu", "mish", "elu", "softplus", "hardswish", "hardsigmoid", "log_sigmoid", "fill", "zero", "gt", "lt"),
    *("ge", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "dropout"),
    *("native_dropout", "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm", "native_layer_norm"),
    *("rms_norm", "_fused_rms_norm", "mean", "sum", "var", "std", "var_mean", "atan2", "remainder", "nan_to_num"),
    *("cross_entropy_loss", "nll_loss", "nll_loss_forward", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "argmax", "argmin", "amax", "amin"),
)
"""Operations beside ELEMENTWISE that a fused kernel takes in: of each element, and over rows."""
FUSIBLE_PREFIX = "_foreach_"


def spared(operations: Iterable[tuple[str, float]]) -> float:
    """Seconds that fused kernels, or leaving copies out, would save at most.

    `operations`: their names and seconds, one after the other, without those that are tiny, such as views. Of a chain
    the longest one stays.
    """
    total, links = 0.0, list[float]()
    for name, seconds in operations:
        plain = name.rpartition("::")[2].rstrip("_")
        if is_fusible(name):
            links.append(seconds)
            continue
        total += _of_chain(links)
        links = []
        total += seconds if plain in COPIES else 0.0
    return total + _of_chain(links)


def is_fusible(name: str) -> bool:
    """Whether an operation computes each element, or each row, by itself, in a time that follows from their number."""
    family, _, operation = name.rpartition("::")
    plain = operation.rstrip("_").removesuffix("_data").removesuffix("_backward")
    is_known = plain in FUSIBLE or plain in ELEMENTWISE or plain.startswith(FUSIBLE_PREFIX)
    return family == "aten" and is_known and plain not in COPIES


def _of_chain(links: list[float]) -> float:
    return sum(links) - max(links) if len(links) >= LEAST_LINKS else 0.0
