"""The completions and the manual pages: what they offer in the real shells, and that they are as generated."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpulaunch.cli.usage import options

REPOSITORY = Path(__file__).parents[2]
COMPLETIONS = REPOSITORY / "cpulaunch/completions"
PAGES = sorted((REPOSITORY / "docs/man").glob("*.1"))

LINES = [
    # what is typed -> what is offered, and what is not
    ("cpulaunch pl", ["plan"], ["probe"]),
    ("cpulaunch ", ["run", "plan", "completion", "help", "train.py", "folder"], ["notes.txt"]),
    ("cpulaunch --mem", ["--membind"], ["--mmap-weights"]),
    ("cpulaunch --membind ", ["preferred", "bind", "interleave", "none"], ["train.py"]),
    ("cpulaunch --membind=in", ["interleave"], []),
    ("cpulaunch --env A=pl", [], ["plan"]),
    ("cpulaunch --membind=bind --env A=1 --nnodes 1:2 pl", ["plan"], []),
    ("cpulaunch -O ", ["0", "1", "2", "3", "4"], ["train.py"]),
    ("cpulaunch --no-s", ["--no-smt", "--no-strict"], []),
    ("cpulaunch --", ["--smt", "--instances"], ["--no-smt"]),
    ("cpulaunch --no-smt --ins", ["--instances"], []),
    ("cpulaunch --instances 2 pl", ["plan"], []),
    ("cpulaunch --cores_per_instance 2 pl", ["plan"], []),
    ("cpulaunch --nproc-per-node ", ["auto", "numa", "l3"], ["N"]),
    ("cpulaunch plan --br", ["--brief"], []),
    ("cpulaunch plan --cpus 0-3 tr", ["train.py"], ["translate"]),
    ("cpulaunch torchrun --nnodes 1 --rdzv-b", ["--rdzv-backend"], []),
    ("cpulaunch ipexrun --ninstances 2 --node", ["--nodes-list", "--node-id"], ["--node-rank"]),
    ("cpulaunch run_cpu --ninstances 2 tr", ["train.py"], ["translate", "notes.txt"]),
    ("cpulaunch ipexrun train.py no", ["notes.txt"], ["--no-smt"]),
    ("cpulaunch train.py --br", [], ["--brief"]),
    ("cpulaunch train.py no", ["notes.txt"], []),
    ("cpulaunch --profile lat", ["latency"], []),
    ("cpulaunch --profile mi", ["mine"], []),
    ("cpulaunch --log-dir ", ["folder"], ["notes.txt", "train.py"]),
    ("cpulaunch --report no", ["notes.txt"], []),
    ("cpulaunch --no-python bas", ["bash"], []),
    ("cpulaunch --module tr", [], ["train.py", "translate"]),
    ("cpulaunch profiles ", ["list", "show", "validate"], ["train.py"]),
    ("cpulaunch profiles show xeon", ["xeon-amx"], ["throughput"]),
    ("cpulaunch profiles show mi", ["mine"], []),
    ("cpulaunch profiles show --j", ["--json"], []),
    ("cpulaunch profiles validate ", ["mine.toml", "folder"], ["train.py"]),
    ("cpulaunch probe --", ["--json", "--svg", "--sysroot", "--help"], ["--instances"]),
    ("cpulaunch completion ", ["bash", "zsh", "fish"], ["train.py"]),
    ("cpulaunch help pla", ["plan", "placement"], []),
    ("cpulaunch --help dis", ["distributed"], []),
    ("cpulaunch plan -h tor", ["torch"], []),
    ("cpulaunch -- pl", [], ["plan"]),
]
OTHER_FILES = {"notes.txt", "train.py", "mine.toml", "folder"}
"""fish offers the files with another suffix too, behind those with the right one."""

BASH = """
source "$1"
while IFS= read -r line; do
    words=${line//=/ = } # as COMP_WORDBREAKS says
    COMP_WORDS=(${words//:/ : })
    [[ $line == *' ' ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _cpulaunch
    echo "${COMPREPLY[*]}"
done
"""
FISH = """
source $argv[1]
while read -l line
    echo (complete -C $line | string split -f 1 \\t)
end
"""
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PROMPT= fpath=('${1:h}' $fpath); unset zle_bracketed_paste; autoload -U compinit; compinit -D -u
    start() { print "<START>"; compprefuncs=(start) }; finish() { print "<FINISH>"; comppostfuncs=(finish) }
    compprefuncs=(start) comppostfuncs=(finish)
    bindkey "^I" complete-word
    compadd() {
        [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]] && { builtin compadd "$@"; return }
        typeset -a found; builtin compadd -A found "$@"; print -rl -- "<"${^found}">"; builtin compadd "$@"
    }
    print "<RE""ADY>"'
zpty -r shell output '*<READY>*'
while IFS= read -r line; do
    zpty -w -n shell $line$'\t'
    zpty -r shell output '*<START>*<FINISH>*'
    zpty -w -n shell $'\x15'
    output=${${output#*<START>}%<FINISH>*}
    print -r -- ${${(M)${(f)output}:#<*>*}//[<>$'\r']/}
done
"""
SHELLS = {"bash": ("cpulaunch.bash", BASH), "zsh": ("_cpulaunch", ZSH), "fish": ("cpulaunch.fish", FISH)}
START = {"bash": ("bash", "-c"), "zsh": ("zsh", "-f", "-c"), "fish": ("fish", "--no-config", "-c")}
LINT = [["mandoc", "-Tlint", "-Wwarning"], ["groff", "-man", "-ww", "-z", "-Tascii"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder, which is the home too."""
    path = tmp_path_factory.mktemp("home")
    for name in ("train.py", "notes.txt", "mine.toml"):
        (path / name).touch()
    profiles = path / ".config/cpulaunch/profiles"
    for each in (path / "folder", profiles):
        each.mkdir(parents=True)
    (profiles / "mine.toml").touch()
    return path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_offers(shell, folder):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    name, script = SHELLS[shell]
    words = [*START[shell], script, *(["-"] if shell != "fish" else []), COMPLETIONS / name]
    done = subprocess.run(
        words,
        input="".join(f"{line}\n" for line, _, _ in LINES),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    offered = done.stdout.split("\n")[: len(LINES)]
    assert done.stderr == ""
    wrong = {}
    for (line, expected, absent), words in zip(LINES, offered, strict=True):
        names = {word.rstrip("/").rpartition("=")[2] for word in words.split()}
        unwanted = set(absent) - OTHER_FILES if shell == "fish" else set(absent)
        if not names.issuperset(expected) or names & unwanted:
            wrong[line] = words
    assert wrong == {}


def test_bash_takes_no_name_of_a_file_for_a_command_or_a_pattern(tmp_path):
    profiles = tmp_path / "cpulaunch/profiles"
    profiles.mkdir(parents=True)
    for path in (profiles / "$(touch ran).toml", tmp_path / "[x].py", tmp_path / "x.py"):
        path.touch()
    script = 'source "$1"; for cur in [ "$"; do COMPREPLY=(); "$2" "*.py"; printf "<%s>" "${COMPREPLY[@]}"; done'
    said = []
    for function in ("_cpulaunch_files", "_cpulaunch_profiles"):
        words = [*START["bash"], script, "-", COMPLETIONS / "cpulaunch.bash", function]
        environ = {"PATH": os.environ["PATH"], "XDG_CONFIG_HOME": str(tmp_path)}
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
        said.append(done.stdout)
    assert said == ["<[x].py><>", "<[x].py><$(touch ran)>"]
    assert not (tmp_path / "ran").exists()


def test_bash_quotes_what_it_inserts(tmp_path):
    """The names of programs in the PATH, and of profiles in a list, are no names of files for readline."""
    profiles, programs = tmp_path / "cpulaunch/profiles", tmp_path / "bin"
    for folder in (profiles, programs):
        folder.mkdir(parents=True)
    (profiles / "x$(touch ran).toml").touch()
    (programs / "zz $(touch ran)").touch(mode=0o755)
    script = 'source "$1"; kind=--no-python cur=$3; COMPREPLY=(); "$2"; eval "printf \'<%s>\' ${COMPREPLY[*]}"'
    said = []
    for function, typed in (("_cpulaunch_program", "zz"), ("_cpulaunch_profiles", "a,x$")):
        words = [*START["bash"], script, "-", COMPLETIONS / "cpulaunch.bash", function, typed]
        environ = {"PATH": f"{programs}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(tmp_path)}
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
        said.append(done.stdout)
    assert said == ["<zz $(touch ran)>", "<a,x$(touch ran)>"]
    assert not (tmp_path / "ran").exists()


def test_the_completion_for_zsh_can_be_sourced():
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    script = 'autoload -U compinit; compinit -D -u; source "$1"; print $_comps[cpulaunch]'
    words = [*START["zsh"], script, "-", COMPLETIONS / "_cpulaunch"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("_cpulaunch\n", "")


def test_the_files_are_as_generated():
    script = REPOSITORY / "scripts/generate-manuals"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["cpulaunch.bash", "_cpulaunch", "cpulaunch.fish"])
def test_a_completion_has_every_option(name):
    words = set(re.findall(r"--?[a-zA-Z][a-z0-9-]*", re.sub(r"-[sl] (\S)", r"--\1", (COMPLETIONS / name).read_text())))
    wanted = [each for option in options() for each in (option.shown, option.opposite) if each]
    assert [each for each in wanted if each not in words] == []


def test_the_manual_has_every_option():
    text = (REPOSITORY / "docs/man/cpulaunch.1").read_text().replace("\\-", "-")
    wanted = [each for option in options() for each in (*option.names, option.opposite) if each]
    assert [each for each in wanted if f"\\fB{each}\\fR" not in text] == []


@pytest.mark.parametrize("tool", LINT, ids=lambda tool: tool[0])
def test_the_manual_is_formatted_without_warnings(tool):
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed")
    done = subprocess.run([*tool, *PAGES], capture_output=True, text=True, check=False)
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


def test_every_command_has_a_page():
    from cpulaunch.cli.help.commands import COMMANDS

    names = {"cpulaunch", *(f"cpulaunch-{command.name}" for command in COMMANDS if command.name != "run")}
    assert {page.stem for page in PAGES} == names
