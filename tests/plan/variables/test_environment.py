"""Which value of each variable applies, and what each setting puts into the environment."""

import pytest

from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import Host
from cpulaunch.records.plan import LaunchPlan, Note
from tests.plan.machines import GIB, kernel, libraries, machine, plan, quota, replace

FOUR = machine(cores=4)
INTEL = libraries(FOUR, "intel")


def env(made: LaunchPlan, index: int = 0) -> dict[str, str | None]:
    return dict(made.workers[index].env)


def note(made: LaunchPlan, setting: str) -> Note:
    (found,) = [entry for entry in made.notes if entry.setting == setting]
    return found


@pytest.mark.parametrize(
    ("flags", "environ", "profile", "profile_env", "expected"),
    [
        ("", {}, {}, {}, ("4", "default")),
        ("", {}, {"threads": 3}, {}, ("3", "profile:p")),
        ("", {}, {}, {"OMP_NUM_THREADS": "2"}, ("2", "profile:p")),
        ("", {"OMP_NUM_THREADS": "1"}, {"threads": 3}, {"OMP_NUM_THREADS": "2"}, ("1", "environment")),
        ("--threads 2", {"OMP_NUM_THREADS": "1"}, {"threads": 3}, {}, ("2", "cli")),
        ("--env OMP_NUM_THREADS=2", {"OMP_NUM_THREADS": "1"}, {"threads": 3}, {}, ("2", "cli")),
        ("", {"OMP_NUM_THREADS": "2,4"}, {}, {}, ("2,4", "environment")),
    ],
)
def test_precedence_of_the_thread_count(
    flags: str,
    environ: dict[str, str],
    profile: dict[str, object],
    profile_env: dict[str, str],
    expected: tuple[str, str],
) -> None:
    made = plan(FOUR, flags, environ=environ, profile=profile, profile_env=profile_env)
    threads = note(made, "OMP_NUM_THREADS")
    assert (threads.value, threads.origin) == expected
    assert made.workers[0].threads == int(expected[0].split(",")[0])
    assert ("OMP_NUM_THREADS" in env(made)) == (expected[1] != "environment")


def test_each_variable_has_its_own_precedence() -> None:
    made = plan(FOUR, environ={"OMP_NUM_THREADS": "2"})
    assert env(made)["MKL_NUM_THREADS"] == "2"
    made = plan(FOUR, environ={"MKL_NUM_THREADS": "1"})
    assert env(made)["OMP_NUM_THREADS"] == "4"
    assert "MKL_NUM_THREADS" not in env(made)
    for made in (
        plan(FOUR, environ={"OMP_NUM_THREADS": "2"}, profile={"threads": 4}),
        plan(FOUR, "--env OMP_NUM_THREADS=2", profile={"threads": 4}),
    ):
        assert env(made)["MKL_NUM_THREADS"] == "2"
    made = plan(FOUR, "--threads 2 --env MKL_NUM_THREADS=1")
    assert (env(made)["OMP_NUM_THREADS"], env(made)["MKL_NUM_THREADS"]) == ("2", "1")


def test_a_users_value_is_noted_with_what_it_replaces() -> None:
    entry = note(plan(FOUR, environ={"OMP_SCHEDULE": "DYNAMIC"}), "OMP_SCHEDULE")
    assert entry.origin == "environment"
    assert entry.value == "DYNAMIC"
    assert "STATIC" in entry.reason


@pytest.mark.parametrize("text", ["abc", "0", "-2", "", "1e3", "²", "9" * 5000])
def test_a_malformed_thread_count_in_the_environment_is_replaced(text: str) -> None:
    made = plan(FOUR, environ={"OMP_NUM_THREADS": text})
    assert env(made)["OMP_NUM_THREADS"] == "4"
    assert any("OMP_NUM_THREADS" in warning for warning in made.warnings)


@pytest.mark.parametrize(
    "flags", ["--env OMP_NUM_THREADS=abc", "--env MKL_NUM_THREADS=0", "--threads 2 --env OMP_NUM_THREADS=3"]
)
def test_an_invalid_thread_count_on_the_command_line_is_an_error(flags: str) -> None:
    with pytest.raises(UsageError, match="--env"):
        plan(FOUR, flags)


@pytest.mark.parametrize("how", [{"flags": "--threads 8"}, {"environ": {"OMP_NUM_THREADS": "8"}}])
def test_more_threads_than_cpus_is_a_warning_and_the_threads_sleep(how: dict[str, object]) -> None:
    made = plan(FOUR, **how)  # type: ignore[arg-type]
    assert any(warning.startswith("8 threads") for warning in made.warnings)
    assert env(made)["OMP_WAIT_POLICY"] == "PASSIVE"


def test_workers_of_unequal_size_have_their_own_thread_counts() -> None:
    made = plan(FOUR, "--instances 3")
    assert [env(made, index)["OMP_NUM_THREADS"] for index in range(3)] == ["2", "1", "1"]
    assert [env(made, index)["MKL_NUM_THREADS"] for index in range(3)] == ["2", "1", "1"]
    assert note(made, "OMP_NUM_THREADS").value == "2, 1"


def test_env_sets_anything_and_may_hold_equals_signs() -> None:
    made = plan(FOUR, "--env A=b=c --env EMPTY=", environ={"A": "old"})
    assert env(made)["A"] == "b=c"
    assert env(made)["EMPTY"] == ""


def test_a_profiles_variable_beats_a_default_and_loses_to_a_flag() -> None:
    wanted = {"KMP_BLOCKTIME": "7"}
    assert env(plan(INTEL, profile_env=wanted))["KMP_BLOCKTIME"] == "7"
    assert env(plan(INTEL, "--wait-policy passive", profile_env=wanted))["KMP_BLOCKTIME"] == "0"
    assert note(plan(INTEL, profile_env=wanted), "KMP_BLOCKTIME").reason == "p says so"


QUOTA = quota(FOUR, 2.0)
INTEL_QUOTA = quota(INTEL, 2.0)


@pytest.mark.parametrize(
    ("host", "flags", "expected"),
    [
        (FOUR, "", {}),
        (INTEL, "", {"KMP_BLOCKTIME": "1"}),
        (QUOTA, "", {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}),
        (INTEL_QUOTA, "", {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}),
        (FOUR, "--wait-policy active", {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "INFINITY"}),
        (INTEL, "--wait-policy active", {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "infinite"}),
        (QUOTA, "--wait-policy active", {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}),
        (FOUR, "--wait-policy passive", {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}),
        (FOUR, "--instances 5 --oversubscribe", {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}),
        (FOUR, "--instances 2 --binder none", {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}),
    ],
)
def test_waiting(host: Host, flags: str, expected: dict[str, str]) -> None:
    made = env(plan(host, flags))
    assert {name: made[name] for name in _WAITING if name in made} == expected


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def test_spinning_under_a_quota_is_refused_with_a_warning() -> None:
    assert any("--wait-policy active" in warning for warning in plan(QUOTA, "--wait-policy active").warnings)
    assert not plan(QUOTA, profile={"wait_policy": "active"}).warnings
    assert not plan(FOUR, "--wait-policy active").warnings


def test_the_users_wait_policy_is_kept() -> None:
    made = plan(QUOTA, environ={"OMP_WAIT_POLICY": "active"})
    assert not set(_WAITING) & env(made).keys()
    assert any("OMP_WAIT_POLICY=active" in warning for warning in made.warnings)
    made = plan(QUOTA, "--env OMP_WAIT_POLICY=active")
    assert set(_WAITING) & env(made).keys() == {"OMP_WAIT_POLICY"}
    assert any("OMP_WAIT_POLICY=active (--env)" in warning for warning in made.warnings)
    assert env(plan(QUOTA, "--wait-policy passive", environ={"OMP_WAIT_POLICY": "active"}))["GOMP_SPINCOUNT"] == "0"


@pytest.mark.parametrize(
    ("host", "flags", "expected"),
    [
        (FOUR, "", {}),
        (FOUR, "--affinity close", {"OMP_PLACES": "cores", "OMP_PROC_BIND": "close"}),
        (FOUR, "--affinity spread", {"OMP_PLACES": "cores", "OMP_PROC_BIND": "spread"}),
        (FOUR, "--affinity explicit", {"OMP_PLACES": "{0},{1},{2},{3}", "OMP_PROC_BIND": "close"}),
        (FOUR, "--affinity none", {"OMP_PROC_BIND": "false"}),
        (INTEL, "--affinity close", {"KMP_AFFINITY": "granularity=fine,compact,1,0"}),
        (INTEL, "--affinity spread", {"KMP_AFFINITY": "granularity=fine,scatter"}),
        (INTEL, "--affinity explicit", {"KMP_AFFINITY": "granularity=fine,proclist=[0,1,2,3],explicit"}),
        (INTEL, "--affinity none", {"KMP_AFFINITY": "none"}),
    ],
)
def test_pinning(host: Host, flags: str, expected: dict[str, str]) -> None:
    made = env(plan(host, flags))
    assert {name: made[name] for name in _PINNING if name in made} == expected


_PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def test_explicit_pinning_is_each_workers_own() -> None:
    made = plan(FOUR, "--instances 2 --affinity explicit")
    assert [env(made, index)["OMP_PLACES"] for index in range(2)] == ["{0},{1}", "{2},{3}"]


def test_with_smt_places_are_hardware_threads() -> None:
    assert env(plan(machine(cores=2, smt=2), "--smt --affinity close"))["OMP_PLACES"] == "threads"


def test_a_flag_clears_the_users_contradicting_pins_and_a_profile_does_not() -> None:
    users = {"KMP_AFFINITY": "compact", "GOMP_CPU_AFFINITY": "0"}
    cleared = env(plan(FOUR, "--affinity none", environ=users))
    assert (cleared["KMP_AFFINITY"], cleared["GOMP_CPU_AFFINITY"]) == (None, None)
    kept = env(plan(FOUR, profile={"affinity": "close"}, environ=users))
    assert not set(_PINNING) & kept.keys()


@pytest.mark.parametrize("how", ["--binder none", "--instances 2 --binder none"])
def test_threads_are_not_pinned_where_workers_are_not_bound(how: str) -> None:
    made = plan(FOUR, f"{how} --affinity close")
    assert not set(_PINNING) & env(made).keys()
    assert any("--affinity close" in warning for warning in made.warnings)


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        ({"OMP_PROC_BIND": "close"}, True),
        ({"GOMP_CPU_AFFINITY": "0-3"}, True),
        ({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, True),
        ({"OMP_PROC_BIND": "FALSE"}, False),
        ({"KMP_AFFINITY": "disabled"}, False),
        ({}, False),
    ],
)
def test_the_users_own_pins_are_left_alone_with_a_warning(environ: dict[str, str], warned: bool) -> None:
    made = plan(FOUR, environ=environ)
    assert not set(_PINNING) & env(made).keys()
    assert any("DataLoader" in warning for warning in made.warnings) == warned


@pytest.mark.parametrize(
    "environ", [{"OMP_DYNAMIC": "true"}, {"OMP_THREAD_LIMIT": "2"}, {"KMP_DUPLICATE_LIB_OK": "TRUE"}]
)
def test_variables_that_give_wrong_results_are_a_warning(environ: dict[str, str]) -> None:
    made = plan(FOUR, environ=environ)
    assert any(next(iter(environ)) in warning for warning in made.warnings)
    assert not environ.keys() & env(made).keys()


@pytest.mark.parametrize("environ", [{"OMP_DYNAMIC": "false"}, {"OMP_THREAD_LIMIT": "4"}, {"OMP_THREAD_LIMIT": "²"}])
def test_harmless_values_of_those_variables_give_no_warning(environ: dict[str, str]) -> None:
    assert not plan(FOUR, environ=environ).warnings


def test_nothing_harmful_is_ever_set() -> None:
    for host in (FOUR, INTEL, QUOTA):
        for flags in ("", "--affinity close", "--wait-policy active", "--huge-pages"):
            assert not {"OMP_DYNAMIC", "OMP_THREAD_LIMIT", "KMP_DUPLICATE_LIB_OK"} & env(plan(host, flags)).keys()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        (("tcmalloc",), {"THP_MEM_ALLOC_ENABLE": "1"}),
        (("mimalloc",), {"THP_MEM_ALLOC_ENABLE": "1", "MIMALLOC_ALLOW_LARGE_OS_PAGES": "1"}),
    ],
)
def test_huge_pages_by_allocator(names: tuple[str, ...], expected: dict[str, str]) -> None:
    made = env(plan(libraries(FOUR, *names), "--huge-pages"))
    assert {name: value for name, value in made.items() if name in {*expected, "GLIBC_TUNABLES"}} == expected


def test_jemalloc_is_configured_when_it_is_the_allocator() -> None:
    host = libraries(FOUR, "jemalloc")
    assert "background_thread:true" in (env(plan(host))["MALLOC_CONF"] or "")
    assert "thp:always" in (env(plan(host, "--huge-pages"))["MALLOC_CONF"] or "")
    assert "MALLOC_CONF" not in env(plan(libraries(FOUR, "tcmalloc")))
    footprint = {"MALLOC_CONF": "dirty_decay_ms:0"}
    assert env(plan(host, profile_env=footprint))["MALLOC_CONF"] == "dirty_decay_ms:0"


def test_huge_pages_that_the_kernel_denies_are_a_warning() -> None:
    never = kernel(FOUR, transparent_hugepage="never")
    assert any("--huge-pages" in warning for warning in plan(never, "--huge-pages").warnings)
    assert not plan(never).warnings


@pytest.mark.parametrize(
    ("host", "flags", "expected"),
    [
        (machine(cores=4), "", "4"),
        (machine(cores=64), "", "32"),
        (machine(cores=64), "--instances 4", "8"),
        (machine(cores=64), "--instances 64", "1"),
        (replace(machine(cores=16), memory_bytes=4 * GIB), "", "4"),
        (replace(machine(cores=16), memory_bytes=4 * GIB), "--instances 2", "2"),
        (replace(machine(cores=16), memory_bytes=GIB // 2), "", "1"),
        (quota(machine(cores=16), 2.0), "", "2"),
    ],
)
def test_compile_workers_fit_cpus_and_memory(host: Host, flags: str, expected: str) -> None:
    assert env(plan(host, flags))["TORCHINDUCTOR_COMPILE_THREADS"] == expected


def test_a_memory_limit_counts_more_than_the_machines_memory() -> None:
    host = machine(cores=16)
    limited = replace(host, limits=replace(host.limits, memory_bytes=2 * GIB))
    assert env(plan(limited))["TORCHINDUCTOR_COMPILE_THREADS"] == "2"


def test_compile_workers_do_not_follow_the_users_thread_count() -> None:
    assert env(plan(FOUR, environ={"OMP_NUM_THREADS": "1"}))["TORCHINDUCTOR_COMPILE_THREADS"] == "4"
