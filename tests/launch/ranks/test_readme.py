"""The commands under "Coming from torchrun" in the README, with torchrun as an alias of cpulaunch."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[3]


def readme_commands() -> list[str]:
    """The lines of the section's code block that call torchrun."""
    section = (REPOSITORY / "README.md").read_text().split("## Coming from torchrun")[1].split("\n## ")[0]
    return [line for line in section.split("```")[1].splitlines() if "torchrun " in line]


def test_the_readme_has_such_commands() -> None:
    assert len(readme_commands()) >= 5


@pytest.mark.parametrize("command", readme_commands())
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
