"""Reasons why numa-vm has no exit code of the command to pass on."""


class NotAvailableError(Exception):
    """No machine can be emulated here, or it ended before it sent the exit status of the command."""


class NotBootedError(Exception):
    """This machine ended or hung before it started the command; another attempt may succeed."""


class TimedOutError(Exception):
    """The time limit passed; the message describes the state of the machine."""
