"""What disturbed a sample, from files of the kernel as they were before and after it."""

import pytest

from cpulaunch.measure.disturbance import LaunchUsage, disturbance_between, disturbance_reasons, read_counters
from cpulaunch.measure.samples import Disturbance
from cpulaunch.records.host import Budget
from cpulaunch.system.root import Root

MOUNTS = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def counters(tmp_path):
    """A function from the files of a machine to the counters in them."""

    def read(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_counters(Root(str(tmp_path)))

    return read


def files(*, busy=1000, idle=5000, steal=0, throttled=0, hot=0, kills=0):
    return {
        "proc/stat": f"cpu  {busy} 0 0 {idle} 0 0 0 {steal} 7 0\ncpu0 1 1 1 1\n",
        "proc/vmstat": f"nr_free_pages 1\noom_kill {kills}\n",
        "proc/self/cgroup": "0::/job/step\n",
        "proc/self/mountinfo": MOUNTS,
        "sys/fs/cgroup/job/step/cpu.stat": "usage_usec 5\nthrottled_usec 0\n",
        "sys/fs/cgroup/job/cpu.stat": f"usage_usec 5\nthrottled_usec {throttled}\n",
        "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": f"{hot}\n",
        "sys/devices/system/cpu/cpufreq/policy0": "",
    }


def test_each_counter_is_told_as_what_happened_between(counters):
    before = counters(files())
    after = counters(files(busy=1700, idle=5250, steal=50, throttled=1_500_000, hot=2, kills=1))
    usage = LaunchUsage(cpu_seconds=4.0, involuntary_switches=9)
    assert disturbance_between(before, after, usage, seconds=2.0) == Disturbance(
        steal=0.05,
        other_cpus=1.5,
        throttled_seconds=1.5,
        thermal_events=2,
        involuntary_switches=9,
        oom_kills=1,
    )


STAT = (
    "cpu  {total} 0 0 0 0 0 0 0\ncpu0 100 0 0 0 0 0 0 {steal}\ncpu1 {one} 0 0 0 0 0 0 0\ncpu2 {two} 0 0 0\nintr 1 2\n"
)


def test_only_the_cpus_that_may_be_used_count(tmp_path):
    (tmp_path / "proc").mkdir()

    def read(cpus, **times):
        (tmp_path / "proc/stat").write_text(STAT.format(**times))
        return read_counters(Root(str(tmp_path)), cpus)

    own, elsewhere = frozenset({0, 2}), frozenset({1})
    times = {"total": 300, "one": 100, "two": 100, "steal": 25}
    assert read(own, **times).busy == 2.0
    assert read(own, **times).steal == 0.25
    assert read(elsewhere, **times).steal == 0.0
    later = {**times, "one": 900, "total": 1100}
    assert read(own, **later) == read(own, **times)
    assert read(elsewhere, **later).busy == 9.0
    assert read(frozenset({77}), **later).busy == read(None, **later).busy == 11.0


@pytest.mark.parametrize(
    ("threads", "cpus", "others", "disturbed"),
    [(4, 4, 1.0, True), (4, 128, 1.0, False), (4, 128, 64.0, True), (1, 1, 0.4, True), (1, 1, 0.1, False)],
)
def test_what_others_used_is_related_to_what_may_be_used(counters, threads, cpus, others, disturbed):
    budget = Budget(cpus=frozenset(range(cpus)), threads=threads, limited_by="")
    after = counters(files(busy=1000 + int(others * 1000)))
    before = counters(files(busy=1000))
    found = disturbance_between(before, after, LaunchUsage(), seconds=10.0, budget=budget)
    assert bool(disturbance_reasons(found, seconds=10)) == disturbed


@pytest.mark.parametrize("number", ["\u00b2", "x", "9" * 400])
def test_what_is_no_number_of_the_kernel_counts_as_none(counters, number):
    """A worker of root may have put it in place of one; "\u00b2" is a digit that int() does not take."""
    found = counters(files(busy=number, throttled=number, kills=number, hot=number))
    assert (found.busy, found.throttled, found.oom_kills, found.thermal_events) == (0.0, 0.0, 0, 0)


def test_a_kernel_that_tells_nothing_disturbs_nothing(counters):
    before = counters({})
    assert disturbance_between(before, counters({}), LaunchUsage(), seconds=1.0) == Disturbance()


@pytest.mark.parametrize(
    ("disturbance", "text"),
    [
        (Disturbance(steal=0.05), "5% of the CPU time went to other virtual machines"),
        (Disturbance(other_cpus=1.5), "other processes used 1.5 CPUs"),
        (Disturbance(throttled_seconds=0.5), "a CPU quota held it back for 0.5 s"),
        (Disturbance(thermal_events=1), "a core was slowed because it was hot"),
        (Disturbance(steal=0.01, other_cpus=0.2, throttled_seconds=0.1, involuntary_switches=1000), ""),
    ],
)
def test_a_disturbed_sample_says_by_what(disturbance, text):
    assert "".join(disturbance_reasons(disturbance, seconds=10)) == text
