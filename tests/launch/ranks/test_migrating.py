"""The commands under "From torchrun" in docs/migrating.md, with torchrun as an alias of cpulaunch."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[3]


def shown_commands() -> list[str]:
    """The commands of the section's first code block; a backslash joins lines."""
    section = (REPOSITORY / "docs/migrating.md").read_text().split("\n## From torchrun")[1].split("\n## ")[0]
    return section.split("```")[1].replace("\\\n", "").strip().splitlines()


def test_the_page_shows_commands_of_torchrun() -> None:
    assert len([command for command in shown_commands() if "torchrun " in command]) >= 5


@pytest.mark.parametrize("command", shown_commands())
def test_each_command_trains_under_the_alias(command: str, tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    script = f"""shopt -s expand_aliases
alias torchrun='{python} -m cpulaunch'
PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH
{command.replace("scripts/examples", str(REPOSITORY / "scripts/examples"))}
"""
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "mean loss of 2 ranks" in ran.stdout
