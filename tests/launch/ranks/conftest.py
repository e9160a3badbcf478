import shutil
import textwrap

import pytest
from jobs import HERE, finish, start


@pytest.fixture
def folders(tmp_path):
    """A folder with the program for each of the two tools."""
    made = {}
    for tool in ("torchrun", "cpulaunch"):
        made[tool] = tmp_path / tool
        made[tool].mkdir()
        shutil.copy(HERE / "seen.py", made[tool])
    return made


class Launch:
    """Jobs of one test under cpulaunch, in one folder; each ends with the test."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []
        shutil.copy(HERE / "seen.py", folder)

    def write(self, code, name="job.py"):
        """A program in the folder, with a function that writes a file whole."""
        (self.folder / name).write_text(SAYING + textwrap.dedent(code))

    def start(self, *arguments, **options):
        self.started.append(start("cpulaunch", self.folder, arguments, **options))
        return self.started[-1]

    def run(self, *arguments, **options):
        return finish(self.start(*arguments, **options), self.folder)

    def finish(self, process):
        return finish(process, self.folder)

    def end(self):
        for process in self.started:
            process.kill()
            process.communicate()


SAYING = """
import os, signal, socket, subprocess, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def say(name, text):
    with open(name + ".new", "w") as file:
        file.write(str(text))
    os.rename(name + ".new", name)

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""


@pytest.fixture
def launch(tmp_path):
    made = Launch(tmp_path)
    yield made
    made.end()
