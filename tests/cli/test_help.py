"""The help: one screen for a command, topics, and a pager for what is longer than the terminal."""

import os
import pty
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpulaunch.cli import terminal
from cpulaunch.cli.help import pager
from cpulaunch.cli.help.commands import COMMANDS
from cpulaunch.cli.help.layout import Page
from cpulaunch.cli.help.topics import topics
from cpulaunch.cli.usage import help_text, options, print_help

PROMPT = 1
LAUNCHES = [command.name for command in COMMANDS if command.options]


@pytest.mark.parametrize("command", LAUNCHES)
def test_the_help_of_a_command_fits_on_one_screen_with_the_prompt(command):
    lines = help_text(None, Page(width=80), command=command).splitlines()
    assert len(lines) <= 24 - PROMPT
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", LAUNCHES)
def test_it_shows_ten_options_and_ends_with_the_topics(command):
    text = help_text(None, Page(width=80), command=command)
    assert sum(line.startswith("  -") for line in text.splitlines()) == 10
    end = " ".join(text.split("\n\n")[-1].split())
    assert end == f"All options: --help all. Topics: --help {', '.join(topics(options())[1:])}."


def test_it_shows_every_command():
    short, whole = (help_text(topic, Page(width=80)) for topic in (None, "all"))
    assert [command.name for command in COMMANDS if f"  {command.name}  " not in whole] == []
    hidden = [command.name for command in COMMANDS if f"  {command.name}  " not in short]
    assert hidden == ["torchrun", "calibrate", "profiles", "translate", "ipexrun", "run_cpu", "completion"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal_where_words_allow(width):
    for topic in (None, *topics(options())):
        longest = max(help_text(topic, Page(width=width)).splitlines(), key=len)
        assert len(longest) <= max(width, 61), longest


def test_the_topics_together_are_all_options():
    _, *names = topics(options())
    assert len(names) == len(set(names))
    everything = help_text("all", Page(width=80))
    parts = [help_text(name, Page(width=80)) for name in names]
    assert all(part in everything for part in parts)
    assert sum(part.count("\n  -") for part in parts) == everything.count("\n  -") == len(options())


def test_headings_can_be_bold():
    text = help_text(None, Page(width=80, heading=lambda heading: f"<{heading}>"))
    assert [part.split(">")[0] for part in text.split("<")[1:]] == ["Usage:", "Commands:", "Options:"]


def test_summaries_are_short():
    assert [option.summary for option in options() if not 0 < len(option.summary) <= 85] == []


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TERM": "xterm"}, ["less"]),
        ({"TERM": "xterm", "PAGER": "more -d"}, ["more", "-d"]),
        ({"TERM": "xterm", "PAGER": ""}, []),
        ({"TERM": "xterm", "PAGER": "cat"}, []),
        ({"TERM": "xterm", "PAGER": "  "}, []),
        ({"TERM": "xterm", "PAGER": "LESS=R less"}, ["sh", "-c", "LESS=R less"]),
        ({"TERM": "xterm", "PAGER": "col -b | less"}, ["sh", "-c", "col -b | less"]),
        ({"TERM": "dumb", "PAGER": "less"}, []),
        ({}, []),
    ],
)
def test_the_pager(environ, words):
    assert pager.pager_command(environ) == words


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        (["less"], {}, True),
        (["/usr/bin/less", "-X"], {"LESS": "-iR"}, True),
        (["less"], {"LESS": "-i"}, False),
        (["most"], {}, False),
    ],
)
def test_colours_go_to_a_pager_that_shows_them(words, environ, expected):
    assert pager.shows_colors(words, environ) is expected


def read_to_end(fd):
    """What is written to a terminal until all of its other ends are closed."""
    parts = []
    try:
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    except OSError:  # EIO: Linux's end of file.
        pass
    return b"".join(parts).decode().replace("\r\n", "\n")


@pytest.fixture
def on_terminal(monkeypatch):
    """Show the help on a terminal of 24 lines; returns what is written to the terminal itself."""
    monkeypatch.setattr(terminal, "width", lambda: 80)
    monkeypatch.setattr(terminal, "height", lambda: 24)

    def show(topic, environ):
        reader, writer = pty.openpty()
        with ThreadPoolExecutor() as pool, monkeypatch.context() as patch:
            written = pool.submit(read_to_end, reader)
            with os.fdopen(writer, "w") as stdout:
                patch.setattr("sys.stdout", stdout)
                assert print_help(topic, {"TERM": "xterm", "PATH": os.defpath, **environ}) == 0
            return written.result(timeout=60)

    return show


COPY = "sh -c 'cat >paged; echo $LESS >less'"


def test_long_help_goes_through_the_pager(on_terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert on_terminal("distributed", {"PAGER": COPY}) == ""
    assert (tmp_path / "paged").read_text() == help_text("distributed", Page(width=80))
    assert (tmp_path / "less").read_text() == "FRX\n"
    assert on_terminal("all", {"PAGER": COPY, "LESS": "-i"}) == ""
    assert (tmp_path / "less").read_text() == "-i\n"


def test_help_that_fits_is_printed(on_terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "\x1b[1mUsage:\x1b[0m" in on_terminal(None, {"PAGER": COPY})
    assert not (tmp_path / "paged").exists()


@pytest.mark.parametrize(
    ("command", "shown"), [("cat >/dev/null", True), ("kill -INT $$", True), ("exit 1", False), ("'", False)]
)
def test_text_is_not_repeated_after_a_pager_that_a_signal_ended(command, shown):
    assert pager.page(b"text", ["sh", "-c", f"exec 2>/dev/null; {command}"], {"PATH": os.defpath}) is shown


BROKEN = [{"PAGER": "false"}, {"PAGER": "no-such-pager"}, {"PAGER": "cat"}, {"TERM": "dumb"}]


@pytest.mark.parametrize("environ", BROKEN, ids=str)
def test_without_a_working_pager_long_help_is_printed(on_terminal, environ):
    said = on_terminal("all", {"NO_COLOR": "1", **environ})
    assert said == help_text("all", Page(width=80))
