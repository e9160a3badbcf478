"""Variables that an emitted shell script takes from the environment of its caller, because their values are hidden."""

from collections.abc import Collection, Iterable

from cpulaunch.records.errors import UsageError

REASON = "set it before you start this script: --env gave it, and its value is not written here without --show-env"


def required_variables(names: Collection[str]) -> Iterable[str]:
    """Lines that end the script with a message if one of these variables is not set.

    Raises: UsageError for a name that a shell neither reads nor passes on.
    """
    if names:
        yield "\n# Values of --env are not written here. The workers get these variables from your environment.\n"
    for name in sorted(names):
        if not is_identifier(name):
            what = "a shell script cannot take this variable from the environment"
            raise UsageError(what, value=name, source="--env", hint="--show-env writes its value into the script")
        yield f': "${{{name}?{REASON}}}"\nexport {name}\n'


def is_identifier(name: str) -> bool:
    """Whether a shell can export a variable of this name. env(1) sets the others."""
    return name.isascii() and name.isidentifier()
