"""Retired words: private names and riddles that the vocabulary of docs/architecture.md has replaced stay out."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = (
    "cpulaunch",
    "tests",
    "scripts",
    "profiles",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "pyproject.toml",
)

NAMES = """
    AGENTS_ONLY ALONE_SECONDS BY_THE_PROGRAM CAREFUL_BYTES Carrier EndOrder FAREWELL_SECONDS FOR_EVERYBODY
    FROM_THE_LAUNCH GREETING_SECONDS Guarded INSIST Lane LOOK_SECONDS MEANT Meeting MOST_KEPT NAMELESS NEWS_SECONDS
    NOBODY NOT_ITS_FAULT NO_PORT NativeMeeting NotedLogs OF_A_RANK ONE_RANK PlacedWorkers QUIET_SECONDS Residence
    RollCall Seat Seats SignalStrays StraysSeen THIS_HOST TORCHS_OWN Told Tuning WARMING Wiring Wish WorkerEnds
    Yardstick
    _ANYBODY _Around _EXPLAINED _MEETING _NOBODY _Seat _Seats _TwinPlace _UNOWNED _Wanted
    _asked_of_plugin _beaten_notice _collect_garbage_from_here_on _complaint _crowded _first_words _glance _greeted
    _hand_written_environment _is_half_new _is_ours _laid_out _let_others _listens_itself _look_for_strays _lost_line
    _member_layer _or_else _remarks _set_apart _siblings_alone _sparing _stop_like_any_job _take_leave _tell_once
    _tidy_up_after _too_much _unfit _unlike _unowned _visitor _who_lacks _why_not
    allocator_wishes as_anybody ask_at ask_for_short_slices asked_notes asked_to_end become_guarded
    bind_near check_member close_wiring decide_compute default_dispositions end_promptly farewell fresh_keys give_up_on
    give_workers glance glances group_lives hand_on its_ends job_wishes kept_object let_peers_in lost_of_job make_room
    may_want_gpus member_variables name_private_directory needs_of notice_notes open_figures open_meeting open_seat
    open_wiring over_state own_places paid_threads passed_over plugin_absence plugin_wishes prepare_starts put_together
    ranks_here read_told redrawn_by roll_call say_on_stderr scheduler_meant shared_carrier skeleton sleep_at_once stray
    strays take_apart take_turn tell_metric tell_the_rest telling_starts told_figure undrained unseen wishes
    worker_wishes worth_it yardsticks
"""
"""Names of code, as whole words in the case written here."""

PHRASES = """
    each is a rank already
    cannot be meant
    cores nobody shares
    did not come up
    fast twin
    give out SMT siblings
    gives no right to
    going on without
    is a text, not
    is not to be found out
    larger than what there is
    leave away
    let at one another
    nobody
    nobody answers
    nobody to talk to
    outermost calls of modules
    profile lacks a key
    roll call
    threads side by side
    turn every degradation into an error
    what answers there
    where the ranks meet
    who binds
    who waits
    whoever
"""
"""Sentences and words of prose, in any case."""


def files() -> list[Path]:
    """The files of the project that are written by hand."""
    command = ["git", "ls-files", "--", *PLACES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    own = {"tests/test_words.py"}
    return [ROOT / name for name in listed if name not in own and not name.startswith("tests/data/")]


def retired() -> re.Pattern[str]:
    """A pattern that matches each retired word or phrase, over line ends too."""
    names = "|".join(NAMES.split())
    phrases = "|".join(
        re.escape(line.strip()).replace(r"\ ", r"\s+(?:[#*]\s+)?") for line in PHRASES.strip().splitlines()
    )
    return re.compile(rf"(?<!\w)(?:(?:{names})|(?i:{phrases}))(?!\w)")


def occurrences(text: str) -> list[str]:
    """The retired words in a text, each as "line: word"."""
    return [f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in retired().finditer(text)]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the list of files comes from git, and this is no checkout")
def test_retired_words_stay_out() -> None:
    found = []
    for path in files():
        if path.is_symlink():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # A picture or an archive.
        found += [f"{path.relative_to(ROOT)}:{each}" for each in occurrences(text)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = Wish(1)", ["1: Wish"]),
        ("# nobody knows", ["1: nobody"]),
        ("\nNobody  answers", ["2: Nobody"]),
        ("# a flag that cannot\n# be meant", ["1: cannot\n# be meant"]),
        ("a wishful seating plan for everybody", []),
    ],
)
def test_a_retired_word_is_found(text: str, expected: list[str]) -> None:
    assert occurrences(text) == expected
