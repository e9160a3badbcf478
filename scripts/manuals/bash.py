"""The completion for bash."""

from collections.abc import Iterable, Iterator

from manuals.commands import FOREIGN, LAUNCHES, PROFILES, SUMMARIES, WORDS_FOR_HELP, Manual, manuals, value_kind

from cpulaunch.cli.help.options import Option

TEMPLATE = r"""# bash completion for cpulaunch. Written by scripts/generate-manuals. No other program is started for it.

_cpulaunch_words() {
    local IFS=$' \t\n'
    COMPREPLY+=($(compgen -W "$1" -- "$cur"))
}

_cpulaunch_files() { # the pattern of the files' names; directories are offered too
    local file
    compopt -o filenames 2>/dev/null
    while IFS= read -r file; do # not by $(...), which takes a name with "*" for a pattern
        COMPREPLY+=("$file")
    done < <(
        compgen -d -- "$cur"
        compgen -f -X "!$1" -- "$cur"
    )
}

_cpulaunch_profiles() { # further words; names may be in a list with commas
    local IFS=$' \t\n' name list=
    [[ $cur == *,* ]] && list=${cur%,*},
    for name in "${XDG_CONFIG_HOME:-$HOME/.config}"/cpulaunch/profiles/*.toml @profiles@ $1; do
        name=${name##*/}
        name=${name%.toml} # compgen -W would run a name such as "$(command)"
        [[ $name != '*' && $name == "${cur##*,}"* ]] || continue
        [[ ! $list ]] || printf -v name %q "$name" # readline quotes the others, as names of files
        COMPREPLY+=("$list$name")
    done
    [[ $list ]] || _cpulaunch_files '*.toml'
}

_cpulaunch_takes_value() {
    case $1 in
        @values@) return 0 ;;
    esac
    return 1
}

_cpulaunch_value() { # what follows this option
    case $1 in
@cases@
    esac
}

_cpulaunch_help() {
    _cpulaunch_words "@topics@"
}

_cpulaunch_options() {
    case $1 in
@options@
    esac
}

_cpulaunch_argument() { # of a command that starts nothing
    case $1 in
@arguments@
    esac
}

_cpulaunch_program() { # the name of the program
    if [[ $kind == --no-python ]]; then
        local name
        while IFS= read -r name; do # quoted, as readline does not quote what need not be a file
            printf -v name %q "$name"
            COMPREPLY+=("$name")
        done < <(compgen -c -- "$cur")
    elif [[ $kind != --module ]]; then
        [[ $command || ${COMP_WORDS[COMP_CWORD - 1]} == -- ]] || _cpulaunch_words "@names@"
        _cpulaunch_files '*.py'
    fi
}

_cpulaunch_rest() { # the arguments of the program, whose name is word $1
    if [[ $kind == --no-python ]] && declare -F _command_offset >/dev/null; then
        _command_offset "$1"
    else
        _cpulaunch_files '*'
    fi
}

_cpulaunch() {
    local cur=${COMP_WORDS[COMP_CWORD]} command= kind= help= word at=1
    COMPREPLY=()
    while ((at < COMP_CWORD)); do
        word=${COMP_WORDS[at]}
        if [[ $word == [=:]* ]]; then # bash takes A=1 and 1:2 for three words
            ((at += 2))
        elif [[ $word == -- ]]; then
            ((at++))
            break
        elif [[ $word == -* ]]; then
            word=${word//_/-}
            if [[ ${COMP_WORDS[at + 1]} == = ]]; then
                if ((at + 2 >= COMP_CWORD)); then
                    cur=${cur#=}
                    _cpulaunch_value "$word"
                    return
                fi
                ((at += 2))
            elif _cpulaunch_takes_value "$word"; then
                ((at++))
                if ((at == COMP_CWORD)); then
                    _cpulaunch_value "$word"
                    return
                fi
            fi
            case $word in
                -h | --help) help=1 ;;
                -m | --module) kind=--module ;;
                --no-python) kind=--no-python ;;
            esac
            ((at++))
        elif [[ ! $command && " @names@ " == *" $word "* ]]; then
            command=$word
            ((at++))
        elif [[ $command == profiles && " @profiles_commands@ " == *" $word "* ]]; then
            command="profiles $word"
            ((at++))
        else
            break
        fi
    done
    if ((at > COMP_CWORD)); then
        return
    elif [[ $help || $command == help ]]; then
        _cpulaunch_help
    elif ((at < COMP_CWORD)); then
        case $command in
            "" | @programs@) _cpulaunch_rest "$at" ;;
        esac
    elif [[ $cur == -* && ${COMP_WORDS[at - 1]} != -- ]]; then
        _cpulaunch_words "$(_cpulaunch_options "$command")"
    else
        case $command in
            "" | @programs@) _cpulaunch_program ;;
            *) _cpulaunch_argument "$command" ;;
        esac
    fi
}

complete -F _cpulaunch cpulaunch
"""


def completion() -> str:
    """The text of the file."""
    commands = manuals()
    with_value = {option.shown: option for command in commands for option in command.options if option.metavar}
    below = [command.words[1] for command in commands if command.words[:-1] == ("profiles",)]
    parts = {
        "profiles": " ".join(PROFILES),
        "values": _pattern(with_value.values()),
        "cases": "\n".join(_value_cases(with_value.values())),
        "topics": " ".join(WORDS_FOR_HELP),
        "options": "\n".join(_option_cases(commands)),
        "arguments": "\n".join(_argument_cases(commands)),
        "names": " ".join(SUMMARIES),
        "profiles_commands": " ".join(below),
        "programs": " | ".join((*LAUNCHES, *FOREIGN)),
    }
    text = TEMPLATE
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def _pattern(rows: Iterable[Option]) -> str:
    return " | ".join(name for option in rows for name in option.names)


def _value_cases(rows: Iterable[Option]) -> Iterator[str]:
    for option in rows:
        words = " ".join(option.words)
        action = {
            "profile": f'_cpulaunch_profiles "{words}"',
            "file": "_cpulaunch_files '*'",
            "directory": "_cpulaunch_files ''",
            "words": f'_cpulaunch_words "{words}"',
        }.get(value_kind(option))
        if action is not None:
            yield f"        {_pattern([option])}) {action} ;;"
    yield "        -h | --help) _cpulaunch_help ;;"


def _option_cases(commands: Iterable[Manual]) -> Iterator[str]:
    """The options to offer: opposites only where `--no-` has been typed, which keeps the list short."""
    for command in commands:
        name = " ".join(command.words)
        pattern = '"" | ' + " | ".join(LAUNCHES) if name == LAUNCHES[0] else f'"{name}"'
        if name in LAUNCHES[1:]:
            continue
        shown = " ".join(option.shown for option in command.options)
        opposite = " ".join(option.opposite for option in command.options if option.opposite)
        yield f"        {pattern})"
        yield f'            echo "{shown}"'
        if opposite:
            yield f'            [[ $cur != --no* ]] || echo "{opposite}"'
        yield "            ;;"


def _argument_cases(commands: Iterable[Manual]) -> Iterator[str]:
    for command in commands:
        name = " ".join(command.words)
        below = [other.words[1] for other in commands if other.words[:-1] == command.words]
        if below or command.argument == "words":
            yield f'        "{name}") _cpulaunch_words "{" ".join(below or command.values)}" ;;'
        elif command.argument == "profile":
            yield f'        "{name}") _cpulaunch_profiles ;;'
        elif command.argument == "profile file":
            yield f"        \"{name}\") _cpulaunch_files '*.toml' ;;"
