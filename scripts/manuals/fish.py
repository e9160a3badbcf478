"""The completion for fish."""

from collections.abc import Iterable, Iterator

from manuals.commands import FOREIGN, LAUNCHES, PROFILES, SUMMARIES, WORDS_FOR_HELP, Manual, manuals, value_kind

from cpulaunch.cli.help.options import Option

TEMPLATE = r"""# fish completion for cpulaunch. Written by scripts/generate-manuals. No other program is started for it.

function __cpulaunch_place --description 'What the cursor is at: launch, COMMAND, module, command, rest or help'
    set -l words (commandline -opc)
    set -e words[1]
    set -l place launch
    while set -q words[1]
        set -l word $words[1]
        set -e words[1]
        switch (string replace -a _ - -- $word)
            case --
                set place (string replace launch run -- $place)
            case @values@
                set -e words[1]
            case -h --help
                set place help
            case -m --module
                set place module
            case --no-python
                set place command
            case '-*'
            case @programs@
                test $place = launch; or return (echo rest; true)
                set place $word
            case @names@
                test $place = launch; or return (echo rest; true)
                set place $word
            case @below@
                test $place = profiles; or return (echo rest; true)
                set place "profiles $word"
            case '*'
                contains -- "$place" help @below_places@ @names@; or set place rest
                test "$place" = rest; and break
        end
    end
    echo $place
end

function __cpulaunch_at --description 'Whether the cursor is at one of these places'
    contains -- (__cpulaunch_place) $argv
end

function __cpulaunch_profiles
    printf '%s\n' @profiles@
    set -l config $XDG_CONFIG_HOME ~/.config
    for file in $config[1]/cpulaunch/profiles/*.toml
        string replace -r '.*/(.*)\.toml$' '$1' -- $file
    end
end

complete -c cpulaunch -f
@commands@
complete -c cpulaunch -n '__cpulaunch_at launch @programs@' -k -a '(__fish_complete_suffix .py)'
complete -c cpulaunch -n '__cpulaunch_at command' -a '(__fish_complete_command)'
complete -c cpulaunch -n '__cpulaunch_at rest' -F
complete -c cpulaunch -n '__cpulaunch_at help' -a '@topics@'
@options@
"""
TYPED_NO = "string match -q -- '--no*' (commandline -ct)"
"""Opposites are offered only where `--no` has been typed, which keeps the list short."""
LAUNCHING = f"__cpulaunch_at launch {' '.join(LAUNCHES)} module command"


def completion() -> str:
    """The text of the file."""
    commands = manuals()
    with_value = {option.shown: option for command in commands for option in command.options if option.metavar}
    below = [command.words[1] for command in commands if command.words[:-1] == ("profiles",)]
    others = [name for name in SUMMARIES if name not in (*LAUNCHES, *FOREIGN)]
    parts = {
        "values": " ".join(name for option in with_value.values() for name in option.names),
        "programs": " ".join((*LAUNCHES, *FOREIGN)),
        "names": " ".join(others),
        "below": " ".join(below),
        "below_places": " ".join(f"'profiles {name}'" for name in below),
        "profiles": " ".join(PROFILES),
        "commands": "\n".join(_commands(commands)),
        "topics": " ".join(WORDS_FOR_HELP),
        "options": "\n".join(_options(commands)),
    }
    text = TEMPLATE
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def _commands(commands: Iterable[Manual]) -> Iterator[str]:
    for command in commands:
        where = " ".join(command.words[:-1]) or "launch"
        yield _line(f"__cpulaunch_at {where}", f"-a {command.words[-1]}", command.summary)
    yield _line("__cpulaunch_at launch", "-a help", SUMMARIES["help"])


def _options(commands: Iterable[Manual]) -> Iterator[str]:
    for command in commands:
        name = " ".join(command.words)
        if name in LAUNCHES[1:]:
            continue
        where = LAUNCHING if name in LAUNCHES else f"__cpulaunch_at {quoted(name) if ' ' in name else name}"
        if command.argument in ("words", "profile", "profile file"):
            yield f"complete -c cpulaunch -n {quoted(where)} {_argument(command)}"
        for option in command.options:
            yield _line(where, _names(option) + _value(option), option.summary)
            if option.opposite:
                yield _line(f"{TYPED_NO}; and {where}", f"-l {option.opposite[2:]}", f"the opposite of {option.shown}")


def _argument(command: Manual) -> str:
    return {
        "words": f"-a '{' '.join(command.values)}'",
        "profile": "-a '(__cpulaunch_profiles)'",
        "profile file": "-k -a '(__fish_complete_suffix .toml)'",
    }[command.argument]


def _names(option: Option) -> str:
    return " ".join([*(f"-s {name[1:]}" for name in option.short), f"-l {option.shown[2:]}"])


def _value(option: Option) -> str:
    return {
        "": "",
        "text": " -x",
        "words": f" -x -a '{' '.join(option.words)}'",
        "file": " -r -F",
        "directory": " -x -a '(__fish_complete_directories)'",
        "profile": f' -x -k -a \'(__cpulaunch_profiles; printf "%s\\n" {" ".join(option.words)}; '
        "__fish_complete_suffix .toml)'",
    }[value_kind(option)]


def _line(where: str, what: str, text: str) -> str:
    return f"complete -c cpulaunch -n {quoted(where)} {what} -d {quoted(text)}"


def quoted(text: str) -> str:
    """The text as one word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
