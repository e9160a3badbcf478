"""What goes wrong with oneCCL or with a peer, as the exceptions that a training program sees."""

from __future__ import annotations


class CclError(RuntimeError):
    """oneCCL, or a rank of the group, could not do what was asked; the text says which and what to do."""


class RanksDisagreeError(CclError):
    """Ranks of a group called different collectives, or the same with different sizes or types."""


class PeerLostError(CclError):
    """A rank of the group ended, or did not arrive in time: the group cannot be used any more."""
