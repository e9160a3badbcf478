"""Exceptions that a training program sees when oneCCL or another rank fails."""


class CclError(RuntimeError):
    """A request to oneCCL or to the group failed; the message says why and what to do."""


class RanksDisagreeError(CclError):
    """Ranks of a group called different collectives, or the same one with different sizes or types."""


class PeerLostError(CclError):
    """A rank of the group exited or did not arrive in time; the group can no longer be used."""


class UnavailableError(CclError):
    """A path is not available to all ranks of a group; all ranks get this error with the same reason."""


class UnsupportedError(CclError):
    """A collective that this backend does not support, and gloo may; all ranks get this error."""
