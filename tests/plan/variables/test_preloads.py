"""Which libraries are preloaded: candidates, trials, the user's own list, what is refused."""

import pytest

from cpulaunch.plan.planner import make_plan, preload_candidates
from cpulaunch.plan.variables.preloads import MIN_SHM_BYTES
from cpulaunch.records.errors import UsageError
from cpulaunch.records.host import CpuInfo, Host, Torch
from cpulaunch.records.plan import LaunchPlan, Note
from cpulaunch.records.request import Program
from tests.plan.machines import libraries, machine, plan, replace, request_of

XEON = machine(cores=4)
EPYC = replace(XEON, cpu=CpuInfo(vendor="AuthenticAMD"))
ARM = machine(cores=4, arch="aarch64", vendor="ARM")
MKL = Torch(version="2.13.0", path="/venv/torch", mkl_dispatch_symbol=True, bundled_openmp="/venv/libgomp.so.1")
PLAIN = replace(MKL, mkl_dispatch_symbol=False)
COMMAND = Program(kind="command", target="./server")
ALL = ("intel", "llvm", "tcmalloc", "jemalloc", "mimalloc", "mkl-dispatch")


def names(host: Host, flags: str = "", **more: object) -> list[str]:
    return [candidate.name for candidate in preload_candidates(host, request_of(flags, **more))]  # type: ignore[arg-type]


def preloaded(made: LaunchPlan) -> str | None:
    return dict(made.workers[0].env).get("LD_PRELOAD")


def note(made: LaunchPlan, setting: str) -> Note:
    (found,) = [entry for entry in made.notes if entry.setting == setting]
    return found


@pytest.mark.parametrize(
    ("host", "flags", "expected"),
    [
        (XEON, "", ["intel", "tcmalloc", "jemalloc", "mimalloc"]),
        (EPYC, "", ["intel", "tcmalloc", "jemalloc", "mimalloc", "mkl-dispatch"]),
        (ARM, "", ["tcmalloc", "jemalloc", "mimalloc"]),
        (XEON, "--openmp llvm --allocator jemalloc", ["llvm", "jemalloc"]),
        (XEON, "--openmp default --allocator default", []),
        (ARM, "--openmp llvm --allocator default", ["llvm"]),
        (XEON, "--openmp default --allocator default --mkl-dispatch on", ["mkl-dispatch"]),
        (EPYC, "--openmp default --allocator default --mkl-dispatch off", []),
    ],
)
def test_candidates_in_order_of_preference(host: Host, flags: str, expected: list[str]) -> None:
    assert names(libraries(host, *ALL, torch=MKL), flags) == expected


def test_a_profile_prefers_and_the_command_line_insists() -> None:
    everything = libraries(XEON, *ALL)
    assert names(everything, profile={"allocator": "jemalloc"})[1:] == ["jemalloc", "tcmalloc", "mimalloc"]
    assert names(everything, profile={"openmp": "llvm"})[:2] == ["llvm", "intel"]
    assert names(libraries(XEON, "tcmalloc"), profile={"allocator": "jemalloc"}) == ["tcmalloc"]
    with pytest.raises(UsageError, match="apt install libjemalloc2"):
        names(libraries(XEON, "tcmalloc"), "--allocator jemalloc")


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("--allocator tcmalloc", "apt install libtcmalloc-minimal4"),
        ("--allocator mimalloc", "apt install libmimalloc2.0"),
        ("--openmp intel", "pip install intel-openmp"),
        ("--openmp llvm", "apt install libomp5"),
        ("--mkl-dispatch on", "C compiler"),
    ],
)
def test_the_error_for_a_missing_library_says_how_to_install_it(flags: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        plan(XEON, flags)


def test_without_libraries_nothing_is_preloaded_and_the_note_says_what_to_install() -> None:
    made = plan(EPYC)
    assert preloaded(made) is None
    assert note(made, "allocator").value == "default"
    assert note(made, "allocator").reason.startswith("a preloaded allocator reuses freed memory")
    assert "apt install libtcmalloc-minimal4" in note(made, "allocator").reason
    assert "pip install intel-openmp" in note(made, "openmp").reason
    assert made.warnings == ()


def test_only_libraries_whose_trial_passed_are_preloaded() -> None:
    host = libraries(XEON, *ALL)
    trials = {
        "/usr/lib/libintel.so": None,
        "/usr/lib/libtcmalloc.so": "killed by SIGSEGV",
        "/usr/lib/libjemalloc.so": None,
    }
    made = make_plan(host, request_of(), trials=trials)
    assert preloaded(made) == "/usr/lib/libintel.so:/usr/lib/libjemalloc.so"
    assert "killed by SIGSEGV" in note(made, "allocator").reason


def test_a_library_without_a_trial_is_not_preloaded() -> None:
    assert preloaded(make_plan(libraries(XEON, *ALL), request_of(), trials={})) is None


def test_a_failed_trial_of_a_library_requested_by_name_is_an_error() -> None:
    with pytest.raises(UsageError, match="unsupported page size"):
        make_plan(
            libraries(XEON, "jemalloc"),
            request_of("--allocator jemalloc"),
            trials={"/usr/lib/libjemalloc.so": "unsupported page size"},
        )


def test_a_captured_machines_plan_says_that_libraries_are_not_tried() -> None:
    made = plan(libraries(XEON, "tcmalloc"))
    assert preloaded(made) == "/usr/lib/libtcmalloc.so"
    assert "not tried" in note(made, "allocator").reason


def untrusted(host: Host, name: str, reason: str = "/opt is writable by others") -> Host:
    changed = tuple(replace(lib, untrusted=reason) if lib.name == name else lib for lib in host.libraries)
    return replace(host, libraries=changed)


@pytest.mark.parametrize("flags", ["--openmp intel", "--mkl-dispatch on"])
def test_on_arm_the_hint_for_an_x86_library_is_to_drop_the_option(flags: str) -> None:
    with pytest.raises(UsageError, match=r"x86_64 only: aarch64[^\n]*\nhint: drop --"):
        plan(ARM, flags)


def test_an_untrusted_library_is_skipped_with_a_warning() -> None:
    made = plan(untrusted(libraries(XEON, "tcmalloc", "jemalloc"), "tcmalloc"))
    assert preloaded(made) == "/usr/lib/libjemalloc.so"
    assert any("/opt is writable by others" in warning for warning in made.warnings)


def test_of_many_untrusted_libraries_one_warning_tells() -> None:
    """Another user may make any number of files with such names."""
    host = libraries(XEON, "tcmalloc")
    found = host.libraries[0]
    many = tuple(replace(found, path=f"/tmp/libtcmalloc.so.{i}", untrusted="/tmp is open") for i in range(300))
    warnings = plan(replace(host, libraries=(*many, found))).warnings
    assert [each for each in warnings if "/tmp" in each] == [
        "not preloaded: /tmp/libtcmalloc.so.0: /tmp is open; and 299 more (cpulaunch probe shows them)"
    ]


def test_an_untrusted_library_that_is_not_preferred_gives_no_warning() -> None:
    made = plan(untrusted(libraries(XEON, "tcmalloc", "jemalloc"), "jemalloc"))
    assert preloaded(made) == "/usr/lib/libtcmalloc.so"
    assert made.warnings == ()


def test_an_untrusted_library_requested_by_name_is_an_error() -> None:
    with pytest.raises(UsageError, match="/opt is writable by others"):
        plan(untrusted(libraries(XEON, "tcmalloc"), "tcmalloc"), "--allocator tcmalloc")


@pytest.mark.parametrize("path", ["/my libs/libtcmalloc.so", "/a:b/libtcmalloc.so"])
def test_a_path_the_loader_would_split_is_not_preloaded(path: str) -> None:
    host = libraries(XEON, "tcmalloc")
    assert preloaded(plan(replace(host, libraries=(replace(host.libraries[0], path=path),)))) is None


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ("/my/a.so", "/my/a.so:/usr/lib/libintel.so:/usr/lib/libtcmalloc.so"),
        ("/my/a.so /my/b.so", "/my/a.so:/my/b.so:/usr/lib/libintel.so:/usr/lib/libtcmalloc.so"),
        ("/my/libjemalloc.so.2", "/my/libjemalloc.so.2:/usr/lib/libintel.so"),
        ("libtcmalloc_minimal.so.4:libiomp5.so", None),
        ("/my/libgomp.so.1", "/my/libgomp.so.1:/usr/lib/libtcmalloc.so"),
    ],
)
def test_the_users_own_preloads_come_first_and_are_not_doubled(users: str, expected: str | None) -> None:
    host = libraries(XEON, "intel", "tcmalloc")
    assert preloaded(plan(host, environ={"LD_PRELOAD": users})) == expected
    if " " not in users:
        assigned = plan(host, f"--env LD_PRELOAD={users}", environ={"LD_PRELOAD": "/old.so"})
        assert preloaded(assigned) == (expected or users)


def test_libraries_that_the_user_preloads_are_configured() -> None:
    made = plan(libraries(XEON, "tcmalloc"), environ={"LD_PRELOAD": "/my/libjemalloc.so.2:/my/libiomp5.so"})
    assert note(made, "allocator").origin == "environment"
    assert {"MALLOC_CONF", "KMP_BLOCKTIME"} <= dict(made.workers[0].env).keys()


def test_requesting_another_library_than_the_user_preloads_is_a_warning() -> None:
    made = plan(XEON, "--allocator tcmalloc", environ={"LD_PRELOAD": "/my/libjemalloc.so.2"})
    assert any("--allocator tcmalloc is not applied" in warning for warning in made.warnings)


@pytest.mark.parametrize(
    ("vendor", "torch", "flags", "used", "why"),
    [
        ("AuthenticAMD", MKL, "", True, "slow kernels"),
        ("HygonGenuine", MKL, "", True, "slow kernels"),
        ("GenuineIntel", MKL, "", False, "Intel"),
        ("AuthenticAMD", PLAIN, "", False, "no torch with MKL"),
        ("AuthenticAMD", None, "", False, "no torch with MKL"),
        ("AuthenticAMD", MKL, "--mkl-dispatch off", False, "--mkl-dispatch off"),
        ("GenuineIntel", MKL, "--mkl-dispatch on", True, "--mkl-dispatch on"),
    ],
)
def test_mkl_dispatch(vendor: str, torch: Torch | None, flags: str, used: bool, why: str) -> None:
    host = libraries(replace(XEON, cpu=CpuInfo(vendor=vendor)), "mkl-dispatch", torch=torch)
    made = plan(host, flags)
    assert preloaded(made) == ("/usr/lib/libmkl-dispatch.so" if used else None)
    assert why in note(made, "mkl_dispatch").reason
    assert made.warnings == ()


def test_mkl_dispatch_without_effect_is_a_warning() -> None:
    made = plan(libraries(EPYC, "mkl-dispatch", torch=PLAIN), "--mkl-dispatch on")
    assert any("--mkl-dispatch on" in warning for warning in made.warnings)


def test_on_amd_without_the_dispatch_library_the_note_says_how_to_get_it() -> None:
    assert "C compiler" in note(plan(libraries(EPYC, torch=MKL)), "mkl_dispatch").reason


def test_a_command_gets_preloads_only_on_request() -> None:
    host = libraries(EPYC, *ALL, torch=MKL)
    assert preloaded(plan(host, program=COMMAND)) is None
    assert preloaded(plan(host, "--allocator jemalloc", program=COMMAND)) == "/usr/lib/libjemalloc.so"


def test_on_arm_torchs_own_runtime_leads_the_list() -> None:
    host = libraries(ARM, "tcmalloc", torch=MKL)
    assert preloaded(plan(host)) == "/venv/libgomp.so.1:/usr/lib/libtcmalloc.so"
    assert preloaded(plan(libraries(ARM, torch=MKL))) is None
    both = libraries(ARM, "llvm", "tcmalloc", torch=MKL)
    assert preloaded(plan(both, "--openmp llvm")) == "/usr/lib/libllvm.so:/usr/lib/libtcmalloc.so"
    own = {"LD_PRELOAD": "/my/libgomp.so.1"}
    assert preloaded(plan(host, environ=own)) == "/my/libgomp.so.1:/usr/lib/libtcmalloc.so"
    spaced = replace(MKL, bundled_openmp="/my env/libgomp.so.1")
    assert preloaded(plan(libraries(ARM, "tcmalloc", torch=spaced))) == "/usr/lib/libtcmalloc.so"


@pytest.mark.parametrize(
    ("free", "flags", "used", "warned"),
    [
        (None, "", True, False),
        (MIN_SHM_BYTES, "", True, False),
        (MIN_SHM_BYTES - 1, "", False, False),
        (0, "--openmp llvm", True, True),
        (0, "--openmp default", False, False),
    ],
)
def test_a_full_dev_shm_kills_runtimes(free: int | None, flags: str, used: bool, warned: bool) -> None:
    made = plan(replace(libraries(XEON, "intel", "llvm"), shm_free_bytes=free), flags)
    assert (preloaded(made) is not None) == used
    assert any("/dev/shm is full" in warning for warning in made.warnings) == warned
    assert ("/dev/shm is full" in note(made, "openmp").reason) == (not used and not flags)


def test_in_a_full_dev_shm_a_profiles_runtime_is_left_out() -> None:
    full = replace(libraries(XEON, "intel", "llvm"), shm_free_bytes=0)
    assert names(full, profile={"openmp": "llvm"}) == []
    assert any("/dev/shm is full" in each for each in plan(full, profile={"openmp": "llvm"}).warnings)
    assert not plan(full).warnings


def test_a_full_dev_shm_is_named_only_where_a_runtime_could_be_preloaded() -> None:
    for installed in ((), ("intel",)):
        host = untrusted(replace(libraries(XEON, *installed), shm_free_bytes=0), "intel")
        assert "/dev/shm" not in note(plan(host), "openmp").reason
    assert "none is installed" in note(plan(replace(XEON, shm_free_bytes=0)), "openmp").reason


def test_an_untrusted_runtime_is_warned_of_in_a_full_dev_shm_too() -> None:
    host = replace(libraries(XEON, "intel"), shm_free_bytes=0)
    better = replace(host.libraries[0], path="/opt/libiomp5.so", untrusted="/opt is writable by others")
    made = plan(replace(host, libraries=(better, *host.libraries)), "--openmp intel")
    assert preloaded(made) == "/usr/lib/libintel.so"
    assert len(made.warnings) == 2


def test_torch_that_includes_intels_runtime_needs_no_other() -> None:
    conda = replace(MKL, bundled_openmp="/conda/lib/libiomp5.so")
    made = plan(libraries(XEON, "intel", torch=conda))
    assert preloaded(made) is None
    assert dict(made.workers[0].env)["KMP_BLOCKTIME"] == "1"
