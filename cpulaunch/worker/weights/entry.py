"""One weight of the program and its packed form; the weight stays the program's, and a change of it is noticed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cpulaunch.records.record import record
from cpulaunch.worker.tensors.access import watch_access
from cpulaunch.worker.tensors.owners import is_held_elsewhere, own_view, owned
from cpulaunch.worker.weights.form import Form, Linear

HIGHER = {"int4": "int8", "int8": "bf16", "bf16": "fp32"}
"""The type in which a layer is kept that loses too much precision in the type asked for."""

MAX_ERRORS = {"int4": 0.12, "int8": 0.02, "bf16": 0.01}
"""Largest error of a layer's output, as a share of its norm. Normally distributed weights give half of it or less."""

MAX_CHANGES = 4
"""After so many changes the weight is being trained: it is not packed again."""


_Product = tuple[torch.Size, torch.dtype, "torch.dtype | None", Callable[[Tensor], Tensor], Form]
"""Shape and type of the activations, autocast's type (None: it is off), the function for few rows, and its form."""


@record
class Loss:
    """What a layer loses: `error` of its output relative to fp32 (norm), `kind`: the type in which it is kept.

    `rejected`: the error of the type asked for, if that was too large. `layer`: its shape, as text.
    """

    error: float
    kind: str
    rejected: float
    layer: str


class ResidentWeight:
    """A weight that products may use in another form, which is made at the second product with the weight.

    A program that uses a weight once gains nothing from a form. `loss` is measured with the input of that product.
    """

    def __init__(self, weight: nn.Parameter, kind: str, *, transposed: bool) -> None:
        self.kind = kind
        self.transposed = transposed
        self.form: Form | None = None
        self.loss: Loss | None = None
        self.changed = False
        self.changes = 0
        self._uses_to_wait = 1
        self._product: _Product | None = None
        self._remember(weight)

    def _remember(self, weight: Tensor) -> None:
        self._version = weight._version
        self._pointer = weight.data_ptr()
        self._dtype = weight.dtype
        shape: tuple[int, ...] = tuple(weight.shape) if weight.dim() == 2 else (-1, -1)  # No product has that.
        self._columns, self._rows = shape if self.transposed else shape[::-1]
        self.changed = False
        self._product = None
        watch_access(self, [weight])

    def valid_form(self, weight: Tensor) -> Form | None:
        """The form if the weight is as it was when the form was made. Effect: drops a form that is out of date."""
        form, state = self.form, (weight._version, weight.data_ptr())
        if state != (self._version, self._pointer) or self.changed or (form is not None and form.state != state):
            self._drop(weight)
            return None
        return form

    def note_product(self, x: Tensor, form: Form, autocast: torch.dtype | None) -> None:
        """Effect: a product without bias of few rows with this form, which is valid, can be repeated."""
        few = form.few(x, x.dtype if autocast is None else autocast)
        self._product = None if few is None else (x.shape, x.dtype, autocast, few, form)

    def repeated(self, x: Tensor, weight: Tensor, autocast: torch.dtype | None) -> Tensor | None:
        """The product without bias if it is like the last one; None if it is not, or the weight has changed.

        Text generation makes hundreds of them for a token: what the last one has established is not asked again.
        """
        product = self._product
        if (
            product is None
            or self.changed
            or (weight._version, weight.data_ptr()) != product[4].state
            or x.shape != product[0]
            or x.dtype is not product[1]
            or autocast is not product[2]
            or self.form is not product[4]  # Last: another thread may have dropped it, and this one noted it since.
        ):
            return None
        return product[3](x if autocast is None or autocast is x.dtype else x.to(autocast))

    def _drop(self, weight: Tensor) -> None:
        if self.form is not None:
            self.changes += 1
        self.form = None
        self._uses_to_wait = 1 << self.changes
        self._remember(weight)

    def free(self) -> None:
        """Effect: drops the form; it is made again at the second use from now on."""
        self.form = self._product = None
        self._uses_to_wait = max(1, self._uses_to_wait)

    def accepts(self, x: Tensor, bias: Tensor | None, *, is_autocast: bool) -> bool:
        """Whether torch accepts this product too, and the bias is one for each row of the weight."""
        if not x.dim() or x.shape[-1] != self._columns or not (is_autocast or x.dtype is self._dtype):
            return False
        if bias is None:
            return True
        if bias.dim() != 1 or bias.shape[0] != self._rows or not bias.is_cpu or bias.is_neg():
            return False
        return bias.dtype is self._dtype and type(bias) in (Tensor, nn.Parameter) and bias.is_contiguous()

    def is_due(self, weight: Tensor) -> bool:
        """Whether the form is to be made at this use. Effect: counts the use.

        Not while the program holds another tensor in the same memory: it may be what `.data` returned, through which
        changes are not noticed.
        """
        if self.changes > MAX_CHANGES:
            return False
        self._uses_to_wait -= 1
        return self._uses_to_wait < 0 and not is_held_elsewhere(weight)

    def make(self, weight: Tensor, x: Tensor, bias: Tensor | None, plain: Linear) -> Tensor:
        """The product in the program's own precision. Effect: makes the form, in a higher type if it loses too much.

        What a type loses does not show where the input is zero, such as padding: such a product makes no form.
        """
        state = weight._version, weight.data_ptr()  # First: another thread may change the weight meanwhile.
        original = own_view(weight)
        if self.transposed:
            original = owned(original.t())
        y = plain(x, original, bias)
        row, is_telling = _largest_row(x)
        kind = self.kind
        if not is_telling and kind != "fp32":
            return y
        x, expected = (tensor.reshape(-1, tensor.shape[-1])[row : row + 1] for tensor in (x, y))
        form, first = _tried(original, kind, x, expected, bias=bias, plain=plain)
        error = first
        while kind != "fp32" and error > MAX_ERRORS[kind]:
            kind = HIGHER[kind]
            form, error = _tried(original, kind, x, expected, bias=bias, plain=plain)
        self.loss = Loss(error=error, kind=kind, rejected=first, layer=str(list(original.shape)))
        if form is not None:
            form.state = state
        self.form, self._product = form, None
        return y


def _largest_row(x: Tensor) -> tuple[int, bool]:
    """The index of the row with the largest norm, and whether that is finite and not zero."""
    norms = torch.linalg.vector_norm(x.reshape(-1, x.shape[-1]), dim=-1, dtype=torch.float32)
    norms = norms.nan_to_num(nan=0.0, posinf=0.0)
    row = int(norms.argmax())
    return row, bool(norms[row] > 0)


def _tried(
    original: Tensor, kind: str, x: Tensor, expected: Tensor, *, bias: Tensor | None, plain: Linear
) -> tuple[Form | None, float]:
    """The form of this type, and the error of its product for a row, relative to the expected one."""
    try:
        form = Form(original, kind)
    except ValueError:
        return None, float("inf")
    return form, relative_error(expected, form.multiply(x, bias, plain))


def relative_error(expected: Tensor, got: Tensor) -> float:
    """The norm of the difference relative to that of the expected tensor; infinite if NaN or infinity differ."""
    reference, result = expected.float(), got.float()
    finite = reference.isfinite()
    if not finite.equal(result.isfinite()):
        return float("inf")
    size = reference[finite].norm().item()
    return (reference - result)[finite].norm().item() / size if size else 0.0
