"""The completion for zsh."""

from collections.abc import Iterable, Iterator

from manuals.commands import LAUNCHES, PROFILES, SUMMARIES, WORDS_FOR_HELP, Manual, manuals, value_kind

from cpulaunch.cli.help.options import Option

TEMPLATE = r"""#compdef cpulaunch
# Written by scripts/generate-manuals. No other program is started for it.

_cpulaunch_commands() {
  local -a commands=(
@commands@
  )
  _describe -t commands command commands
}

_cpulaunch_topics() {
  local -a topics=(@topics@)
  _describe -t topics topic topics
}

_cpulaunch_profiles() {
  local -a names=(@profiles@ ${XDG_CONFIG_HOME:-$HOME/.config}/cpulaunch/profiles/*.toml(N:t:r))
  _alternative 'profiles:profile:compadd -a names' 'files:profile:_files -g "*.toml(-.)"'
}

_cpulaunch_profile_list() { # names in a list with commas
  local -a names=(@profiles@ auto none ${XDG_CONFIG_HOME:-$HOME/.config}/cpulaunch/profiles/*.toml(N:t:r))
  if compset -P '*,'; then
    compadd -qS , -a names
  else
    _alternative 'profiles:profile:compadd -qS , -a names' 'files:profile:_files -g "*.toml(-.)"'
  fi
}

_cpulaunch_program() {
  if (( $+opt_args[-m] || $+opt_args[--module] )); then
    _message module
  elif (( $+opt_args[--no-python] )); then
    _command_names -e
  elif [[ $service == cpulaunch-launch || $words[CURRENT-1] == -- ]]; then
    _files -g '*.py(-.)'
  else
    _alternative 'commands:command:_cpulaunch_commands' 'files:script:_files -g "*.py(-.)"'
  fi
}

_cpulaunch_launch() { # cpulaunch itself, or run, plan or torchrun
  local curcontext=$curcontext state state_descr line ret=1
  typeset -A opt_args
  local -a options=(
@launch@
  )
  (( ${words[(I)--no*]} )) && options+=( # offered only where --no has been typed, which keeps the list short
@opposites@
  )
  _arguments -C -S -A '-*' $options '1: :->program' '*:: :->rest' && ret=0
  case $state in
    program) _cpulaunch_program && ret=0 ;;
    rest) _cpulaunch_rest && ret=0 ;;
  esac
  return ret
}

_cpulaunch_rest() { # a command and its arguments, or a program and its own
  if (( $+opt_args[-h] || $+opt_args[--help] )); then
    return 1
  elif (( $+opt_args[--no-python] )); then
    _normal
  elif [[ $service == cpulaunch-launch ]]; then
    _files
  else
    case $words[1] in
      @launches@) service=cpulaunch-launch _cpulaunch_launch ;;
@cases@
      *) _files ;;
    esac
  fi
}

_cpulaunch_below_profiles() {
  local curcontext=$curcontext state line
  typeset -A opt_args
  _arguments -C -A '-*' '(- *)'{-h,--help}'[show the help]' '1: :((@below@))' '*:: :->rest' && return
  [[ $state == rest ]] || return
  case $words[1] in
@below_cases@
  esac
}

_cpulaunch() {
  local at
  for (( at = 2; at < CURRENT; at++ )); do # --cores_per_instance is --cores-per-instance
    [[ $words[at] == --no-python ]] && break
    [[ $words[at] == --*_* ]] && words[at]=${${words[at]%%=*}//_/-}${(M)words[at]%%=*}
  done
  if (( CURRENT > 2 )) && [[ $words[CURRENT-1] == (-h|--help) && ${words[2]} == (-*|@launches@) ]]; then
    _cpulaunch_topics
  else
    _cpulaunch_launch
  fi
}

if [[ $funcstack[1] == _cpulaunch ]]; then
  _cpulaunch "$@"
else
  compdef _cpulaunch cpulaunch # the file was sourced
fi
"""


def completion() -> str:
    """The text of the file."""
    commands = manuals()
    below = [command for command in commands if command.words[:-1] == ("profiles",)]
    launch = next(command for command in commands if command.words == (LAUNCHES[0],))
    parts = {
        "commands": "\n".join(f"    {quoted(f'{name}:{summary}')}" for name, summary in SUMMARIES.items()),
        "topics": " ".join(WORDS_FOR_HELP),
        "profiles": " ".join(PROFILES),
        "launch": "\n".join(f"    {spec}" for spec in _specs(launch.options)),
        "opposites": "\n".join(f"    {spec}" for spec in _opposites(launch.options)),
        "launches": "|".join(LAUNCHES),
        "cases": "\n".join(_cases(commands)),
        "below": " ".join(f'{each.words[1]}\\:"{each.summary}"' for each in below),
        "below_cases": "\n".join(_case(each, 4) for each in below),
    }
    text = TEMPLATE
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def quoted(text: str) -> str:
    """The text as one word of zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _escaped(text: str) -> str:
    """The text of an explanation between brackets."""
    return "".join(f"\\{character}" if character in "[]:\\" else character for character in text)


def _specs(rows: Iterable[Option]) -> Iterator[str]:
    """The arguments of _arguments, one for each form of each option."""
    for option in rows:
        attached = [name + ("+" if len(name) == 2 else "=") if option.metavar else name for name in option.names]
        excluded = [*option.names, option.opposite] if option.opposite else option.names
        if option.shown in ("--help", "--version"):
            excluded = ["-", "*"]
        before = "*" if option.repeatable else f"({' '.join(excluded)})"
        for name in attached:
            yield quoted(f"{before}{name}[{_escaped(option.summary)}]{_value(option)}")


def _opposites(rows: Iterable[Option]) -> Iterator[str]:
    for option in rows:
        if option.opposite:
            yield quoted(f"({option.shown} {option.opposite}){option.opposite}[the opposite of {option.shown}]")


def _value(option: Option) -> str:
    kind = value_kind(option)
    if not kind:
        return ""
    action = {
        "profile": "_cpulaunch_profile_list",
        "file": "_files",
        "directory": "_files -/",
        "words": f"({' '.join(option.words)})",
        "text": " ",
    }[kind]
    return f":{_escaped(option.metavar)}:{action}"


def _cases(commands: Iterable[Manual]) -> Iterator[str]:
    yield "      profiles|profile) _cpulaunch_below_profiles ;;"
    yield "      help) _cpulaunch_topics ;;"
    for command in commands:
        if len(command.words) == 1 and command.words[0] not in (*LAUNCHES, "profiles"):
            yield _case(command, 6)


def _case(command: Manual, indent: int) -> str:
    """The line that completes the arguments of a command which starts nothing."""
    argument = {
        "words": [quoted(f"1: :({' '.join(command.values)})")],
        "profile": ["'1: :_cpulaunch_profiles'"],
        "program": ["'1: :_files -g \"*.py(-.)\"'", "'*: :_files'"],
        "profile file": ["'1: :_files -g \"*.toml(-.)\"'"],
    }.get(command.argument, [])
    specs = " ".join([*_specs(command.options), *argument])
    return f"{' ' * indent}{command.words[-1]}) _arguments -A '-*' {specs} ;;"
