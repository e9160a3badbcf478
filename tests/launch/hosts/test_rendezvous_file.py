"""The file of a c10d rendezvous with store_type=file, from which torch runs code."""

import os
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
from test_hosts_pieces import ROOT, config, job
from two_hosts import HERE

from cpulaunch.launch.hosts.agent import stores
from cpulaunch.launch.hosts.agent.main import run_agent
from cpulaunch.launch.hosts.agent.rendezvous import HostRendezvous
from cpulaunch.launch.hosts.agent.stores import with_checked_file
from cpulaunch.launch.hosts.engine import agent_config
from cpulaunch.records.errors import LaunchError
from cpulaunch.records.plan import LaunchOptions
from tests.strangers import UID, as_stranger, folder_of_stranger, in_user_namespace, needs_root

strangers = pytest.fixture(folder_of_stranger)


def file_job(path, *, conf=(("store_type", "file"), ("join_timeout", "1"))):
    return job("c10d", str(path), conf=conf)


def checked(path):
    return with_checked_file(file_job(path)).rendezvous.endpoint


@pytest.fixture
def open_folder(strangers):
    """A sticky folder of root in which every user may make files, as /tmp is."""
    os.chown(strangers, 0, 0)
    strangers.chmod(0o1777)
    return strangers


def test_a_missing_file_is_made_and_torch_gets_its_path_without_links(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert checked("link/store") == checked("real/store") == str(tmp_path / "real/store")
    status = (tmp_path / "real/store").stat()
    assert (status.st_size, stat.S_IMODE(status.st_mode)) == (0, 0o600)


def test_the_content_of_a_file_of_this_user_stays(tmp_path):
    (tmp_path / "store").write_text("state")
    assert checked(tmp_path / "store") == str(tmp_path / "store")
    assert (tmp_path / "store").read_text() == "state"


@pytest.mark.parametrize(
    "unchanged",
    [
        job("c10d", "a:1", conf=(("store_type", "tcp"),)),
        job("static", "a:1", conf=(("store_type", "file"),)),
        job("c10d", "", conf=(("store_type", "file"),)),
    ],
)
def test_other_jobs_have_no_such_file(unchanged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert with_checked_file(unchanged) is unchanged
    assert os.listdir(tmp_path) == []


def test_the_path_of_a_file_is_no_address():
    assert HostRendezvous(file_job("/shared/a:b")).skips_comparison


def test_the_type_is_read_as_torch_does(tmp_path):
    with_checked_file(file_job(tmp_path / "store", conf=(("store_type", " File"),)))
    assert (tmp_path / "store").exists()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "store")
    with pytest.raises(LaunchError, match="cannot use the rendezvous file") as error:
        checked(tmp_path / "store")
    assert error.value.source == "it is no regular file"


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(LaunchError) as error:
        checked(tmp_path / "no/store")
    assert "No such file or directory" in str(error.value)


@needs_root
def test_torch_gets_no_file_of_another_user(open_folder):
    as_stranger(lambda: (open_folder / "store").write_text("code"))
    with pytest.raises(LaunchError, match="other users can change") as error:
        run_agent(config(file_job(open_folder / "store")), -1, begin_end=lambda: None)
    assert error.value.source == f"{open_folder}/store belongs to user {UID}"


@needs_root
@pytest.mark.parametrize("exists", [False, True])
def test_a_link_of_another_user_is_not_followed(open_folder, tmp_path, exists):
    if exists:
        (tmp_path / "own").write_text("keep")
    as_stranger(lambda: (open_folder / "store").symlink_to(tmp_path / "own"))
    with pytest.raises(LaunchError, match="symbolic link of another user") as error:
        checked(open_folder / "store")
    assert f"uid {UID}" in str(error.value)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["keep"] * exists


@needs_root
def test_a_file_that_everyone_can_write_or_that_has_a_second_name_is_refused(open_folder):
    store = open_folder / "store"
    assert checked(store) == str(store)
    store.chmod(0o666)
    with pytest.raises(LaunchError) as error:
        checked(store)
    assert error.value.source == f"{store} may be written by everyone"
    store.chmod(0o600)
    os.link(store, open_folder / "other")
    with pytest.raises(LaunchError) as error:
        checked(store)
    assert error.value.source == "it has several names, in a folder where others can make names"


@needs_root
def test_a_second_name_that_another_user_puts_there_meanwhile_is_refused(open_folder, monkeypatch):
    store, own = open_folder / "store", open_folder / "own"
    own.write_text("keep")
    as_stranger(lambda: store.write_text("code"))
    check = stores.changeable_part

    def exchange(path, **options):
        if path == str(store) and store.stat().st_uid == UID:
            store.unlink()
            os.link(own, store)
        return check(path, **options)

    monkeypatch.setattr(stores, "changeable_part", exchange)
    with pytest.raises(LaunchError) as error:
        checked(store)
    assert error.value.source == "it has several names, in a folder where others can make names"


@needs_root
@pytest.mark.parametrize(("owner", "mode", "reason"), [(UID, 0o755, f"belongs to user {UID}"), (0, 0o777, "may be")])
def test_in_a_folder_where_others_can_exchange_it_no_file_is_made(open_folder, owner, mode, reason):
    (open_folder / "way/below").mkdir(parents=True)
    os.chown(open_folder / "way", owner, 0)
    (open_folder / "way").chmod(mode)
    with pytest.raises(LaunchError) as error:
        checked(open_folder / "way/below/store")
    assert error.value.source.startswith(f"{open_folder}/way {reason}")
    assert os.listdir(open_folder / "way/below") == []


@needs_root
def test_on_a_share_that_maps_users_files_of_the_mapped_one_are_own(strangers, monkeypatch):
    monkeypatch.setattr(stores, "owner_of_new_files", lambda folder: UID)
    (strangers / "store").write_text("state")
    os.chown(strangers / "store", UID, UID)
    assert checked(strangers / "store") == str(strangers / "store")
    os.chown(strangers / "store", UID + 1, UID)
    with pytest.raises(LaunchError, match="other users can change"):
        checked(strangers / "store")


@needs_root
def test_where_root_has_no_number_folders_of_root_are_no_reason_to_refuse(open_folder):
    (open_folder / "roots/own").mkdir(parents=True)
    (open_folder / "roots").chmod(0o755)
    os.chown(open_folder / "roots/own", UID, UID)
    in_user_namespace(lambda: checked(open_folder / "roots/own/store"))
    assert (open_folder / "roots/own/store").stat().st_uid == UID


@pytest.mark.parametrize(
    ("named", "backend", "kind", "expected"),
    [
        ("", "c10d", "file", "/run/store"),
        ("/shared/store", "c10d", "file", "/shared/store"),
        ("", "c10d", "tcp", ""),
        ("", "mine", "file", ""),
    ],
)
def test_a_file_that_the_user_does_not_name_is_in_the_run_s_directory(named, backend, kind, expected):
    plan = SimpleNamespace(launch=LaunchOptions())
    agent = agent_config(plan, job(backend, named, conf=(("store_type", kind),)), "/run", log_dir="/logs")
    assert agent.job.rendezvous.endpoint == expected


@pytest.mark.torch
@pytest.mark.parametrize("options", [(), ("--standalone",), ("--rdzv-backend", "c10d")], ids=" ".join)
def test_a_job_of_one_host_leaves_no_file_of_its_rendezvous(tmp_path, options):
    for name in ("tmp", "work"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-m", "cpulaunch", "--nproc-per-node", "1", "--event-log-handler", "console", *options]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    command += ["--rdzv-conf", "store_type=file", "--no-python", "true"]
    done = subprocess.run(command, cwd=tmp_path / "work", env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [os.listdir(tmp_path / name) for name in ("tmp", "work")] == [[], []]


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.slow
def test_two_hosts_meet_in_the_file(network):
    options = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"]
    meeting = ["--rdzv-endpoint", network.dir / "store", "--rdzv-id", "job-1"]
    runs = []
    for host, address in (("a", "10.77.0.1"), ("b", "10.77.0.2")):
        options_here = [*options, *meeting, "--local-addr", address]
        runs.append(network.cpulaunch(host, *options_here, HERE / "show_variables.py", "RANK", "WORLD_SIZE"))
    assert [run.wait() for run in runs] == [0, 0], runs[0].err + runs[1].err
    reports = [report for run in runs for report in run.reports]
    assert sorted((each["RANK"], each["WORLD_SIZE"]) for each in reports) == [("0", "2"), ("1", "2")]
