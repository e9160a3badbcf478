"""Why a command has no exit code of its own."""


class NotAvailableError(Exception):
    """Why no machine can be emulated here, or what it ended with before it had told the command's status."""


class NotBootedError(Exception):
    """Why this machine did not get as far as the command; another may."""


class TimedOutError(Exception):
    """The time limit passed; the text says how far the machine had come."""
