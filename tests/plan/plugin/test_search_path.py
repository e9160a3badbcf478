"""PYTHONPATH of workers whose Python does not have cpulaunch."""

import pytest

from cpulaunch.plan.plugin.settings import VARIABLE
from tests.plan.machines import TORCH, machine, plan, replace

FOLDER = "/a/cpulaunch/on_path"
HOST = replace(machine(), torch=replace(TORCH, plugin=False), plugin_path=FOLDER)


@pytest.mark.parametrize(
    ("flags", "environ", "expected", "origin"),
    [
        ("", {}, FOLDER, "default"),
        ("", {"PYTHONPATH": ""}, FOLDER, "default"),
        ("", {"PYTHONPATH": "/x:/y"}, f"/x:/y:{FOLDER}", "environment"),
        ("--env PYTHONPATH=/z", {"PYTHONPATH": "/x"}, f"/z:{FOLDER}", "cli"),
        ("--env PYTHONPATH=", {"PYTHONPATH": "/x"}, FOLDER, "cli"),
    ],
)
def test_the_folder_of_the_plugin_follows_the_users(
    flags: str, environ: dict[str, str], expected: str, origin: str
) -> None:
    made = plan(HOST, flags, environ=environ)
    assert [value for name, value in made.workers[0].env if name == "PYTHONPATH"] == [expected]
    (note,) = [note for note in made.notes if note.setting == "PYTHONPATH"]
    assert (note.value, note.origin) == (expected, origin)


def test_instances_may_each_have_their_own() -> None:
    made = plan(HOST, "--instances 2 --env PYTHONPATH=/z/{instance}")
    paths = [[value for name, value in worker.env if name == "PYTHONPATH"] for worker in made.workers]
    assert paths == [[f"/z/0:{FOLDER}"], [f"/z/1:{FOLDER}"]]


def test_settings_inside_torch_apply_without_cpulaunch_beside_it() -> None:
    assert not plan(HOST, "--graph onednn").warnings
    assert VARIABLE in dict(plan(HOST, "--graph onednn").workers[0].env)
