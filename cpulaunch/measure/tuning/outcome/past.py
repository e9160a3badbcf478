"""What earlier searches on this machine found: a file beside each study, and the best of them for a new one."""

from __future__ import annotations

import json
import os

from cpulaunch.measure.tuning.space import value_text
from cpulaunch.records.record import record
from cpulaunch.system.files.reading import read_start
from cpulaunch.system.files.writing import replace as replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from cpulaunch.measure.tuning.identity import StudyIdentity
    from cpulaunch.measure.tuning.space import Configuration, Dimension

FILE = "about.json"
MAX_BYTES = 1 << 16
MAX_STUDIES = 200


@record
class PastStudy:
    """An earlier study. `settings`: its winner's, by name and as text; empty if it has none."""

    folder: str
    program: tuple[str, ...]
    place: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    settings: Mapping[str, str]


def write_about(folder: str, identity: StudyIdentity, winner: Configuration) -> None:
    """Effect: the study's folder says what it is about and what won. Raises: OSError."""
    about = {
        "program": list(_without_arguments(identity.program)),  # Arguments may be as many as there are files.
        "folder": identity.folder,
        "machine": dict(identity.machine),
        "versions": dict(identity.versions),
        "settings": {name: value_text(name, value) for name, value in winner.items()},
    }
    replace_file(os.path.join(folder, FILE), json.dumps(about, indent=1).encode(errors="backslashreplace"))


def past_studies(root: str) -> tuple[PastStudy, ...]:
    """The studies in the latest of the folders of all machines under `root`, the newest first."""
    paths = [path for machine in _folders(root) for path in _folders(machine)]
    paths.sort(key=lambda path: -_time(path))
    return tuple(found for path in paths[:MAX_STUDIES] if (found := _read(path)) is not None)


def _folders(path: str) -> list[str]:
    try:
        return [os.path.join(path, name) for name in sorted(os.listdir(path))]
    except OSError:
        return []


def _time(folder: str) -> float:
    try:
        return os.stat(os.path.join(folder, FILE)).st_mtime
    except OSError:
        return 0.0


def _read(folder: str) -> PastStudy | None:
    try:
        data: Any = json.loads(read_start(os.path.join(folder, FILE), max_bytes=MAX_BYTES))
        return PastStudy(
            folder=folder,
            program=tuple(map(str, data["program"])),
            place=str(data["folder"]),
            machine=_texts(data["machine"]),
            versions=_texts(data["versions"]),
            settings=_texts(data["settings"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # None yet, or of another version.


def _texts(data: Any) -> dict[str, str]:
    return {str(name): str(text) for name, text in data.items()}


def past_configurations(
    studies: Sequence[PastStudy], identity: StudyIdentity, space: Sequence[Dimension]
) -> tuple[Configuration, ...]:
    """What won in the studies of this machine, those of the same program first, as far as the space has the values."""
    own = [each for each in studies if dict(each.machine) == dict(identity.machine)]
    own.sort(key=lambda each: not _is_same_program(each, identity))
    places = {each.name: dict(zip(each.texts(), each.values, strict=True)) for each in space}
    return tuple(
        {name: places[name][text] for name, text in each.settings.items() if text in places.get(name, {})}
        for each in own
    )


def _is_same_program(study: PastStudy, identity: StudyIdentity) -> bool:
    return _without_arguments(study.program) == _without_arguments(identity.program) and study.place == identity.folder


def _without_arguments(program: Sequence[str]) -> tuple[str, ...]:
    """The script, or `-m` and the module, or `--no-python` and the command."""
    return tuple(program[: 2 if program[:1] and program[0].startswith("-") else 1])


def changes_since(studies: Sequence[PastStudy], identity: StudyIdentity) -> Iterator[str]:
    """What is different from the newest study of this program, a text each, if no study of it has all the same."""
    same = [each for each in studies if _is_same_program(each, identity)]
    now = {**identity.machine, **identity.versions}
    found = [_differences({**each.machine, **each.versions}, now) for each in same]
    if found and all(found):
        yield from found[0]


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [f"{name} was {before[name]}, is {value}" for name, value in now.items() if before.get(name, value) != value]
