"""How scripts/numa-vm handles machines that die or hang and a busy apt-get, with stand-ins for both."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

from tests.launch.launching import eventually
from tests.scripts.numa_vm.stand_ins import ERRORS, EXIT_CODE, OUTPUT, StandIns, ending

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
COMMAND_RESULT = (EXIT_CODE, OUTPUT, ERRORS)


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    return StandIns(tmp_path)


@pytest.mark.parametrize(
    ("behaviours", "machines"), [("works", 1), ("ends", 1), ("dies works", 2), ("dies dies works", 3)]
)
def test_a_machine_that_dies_before_the_command_is_replaced(
    stand_ins: StandIns, behaviours: str, machines: int
) -> None:
    assert ending(stand_ins.start(behaviours)) == COMMAND_RESULT
    assert len(stand_ins.calls("machines")) == machines


def test_a_machine_that_hangs_before_the_command_is_replaced(stand_ins: StandIns) -> None:
    assert ending(stand_ins.start("hangs works", "--boot-timeout", "5")) == COMMAND_RESULT
    assert len(stand_ins.calls("machines")) > 1


def test_three_machines_that_die_are_an_error(stand_ins: StandIns) -> None:
    code, output, errors = ending(stand_ins.start("dies"))
    assert (code, output, len(stand_ins.calls("machines"))) == (125, "", 3)
    last = "ended (exit code 1 of QEMU) before it started the command"
    assert errors == f"numa-vm: 3 machines failed to boot; the last one {last}:\nassertion failed\n"


def test_three_machines_that_hang_are_an_error(stand_ins: StandIns) -> None:
    code, output, errors = ending(stand_ins.start("hangs", "--boot-timeout", "0.1"))
    last = "had not started the command after 0.1 s"
    assert (code, output, errors) == (125, "", f"numa-vm: 3 machines failed to boot; the last one {last}\n")


def test_the_time_limit_holds_while_a_machine_boots(stand_ins: StandIns) -> None:
    expected = (124, "", "numa-vm: not finished after 0.1 s (the command had not started)\n")
    assert ending(stand_ins.start("hangs", "--timeout", "0.1")) == expected


def test_a_command_that_started_is_never_started_again(stand_ins: StandIns) -> None:
    code, output, errors = ending(stand_ins.start("breaks works"))
    assert (code, output, len(stand_ins.calls("machines"))) == (125, OUTPUT, 1)
    broken = "the machine ended (exit code 1 of QEMU) while the command ran"
    assert errors == f"{ERRORS}numa-vm: {broken}:\nassertion failed\n"


def test_numa_vm_waits_for_another_apt_get(stand_ins: StandIns) -> None:
    with (stand_ins.folder / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        process = stand_ins.start("works")
        eventually(lambda: stand_ins.calls("refused"), "a call of apt-get")
    assert ending(process) == COMMAND_RESULT
    assert {call.split()[-2] for call in stand_ins.calls("apt-get")} == {"download"}


def test_concurrent_runs_prepare_once_and_remove_leftovers_of_a_killed_run(stand_ins: StandIns) -> None:
    leftover = stand_ins.folder / "cache/cpulaunch-numa-vm/unfinished"
    leftover.mkdir(parents=True)
    (leftover / "linux.deb").write_text("incomplete")
    processes = [stand_ins.start("works") for _ in range(3)]
    assert [ending(process) for process in processes] == [COMMAND_RESULT] * 3
    assert (len(stand_ins.calls("apt-get")), leftover.exists()) == (1, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can update package lists")
def test_outdated_package_lists_are_updated(stand_ins: StandIns) -> None:
    (stand_ins.folder / "stale").touch()
    assert ending(stand_ins.start("works")) == COMMAND_RESULT
    assert [call.split()[-1] for call in stand_ins.calls("apt-get")][1:2] == ["update"]
