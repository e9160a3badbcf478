"""cpulaunch: run any PyTorch program at a CPU server's best, unedited, and see why."""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def metric(name: str, value: float) -> None:
    """Effect: the launch's report holds this figure; the last of each name counts, summed over the workers.

    Without a launch that wants figures (`--report`, `--metric`) nothing happens.
    Raises: TypeError or ValueError if the name is not a line of text, or the value not a finite number.
    """
    from cpulaunch.worker.reporting.events import report_metric

    report_metric(name, value)


def checksum(value: object, name: str = "output") -> None:
    """Effect: the launch can compare this output with another launch's; the last of each name counts.

    `value`: a tensor, an array, a number, a text, or lists, tuples and dicts of these. Neither it nor the state of a
    random number generator changes. Without a launch that wants outputs nothing is computed.
    Raises: TypeError or ValueError for a name that is no line of text, or a value of another type.
    """
    from cpulaunch.worker.reporting.events import report_checksum

    report_checksum(name, value)


def requests(rate: float, count: int, *, warm_up: int = 10) -> "Iterator[int]":
    """The numbers of `count` requests to serve, each given when it arrives: `rate` per second, at random moments.

    The loop's body serves a request: `for number in cpulaunch.requests(20, 500): model(batch)`. Effect: reports the
    percentiles of the latencies, from arrival to the end of the body, as metrics. The first `warm_up` requests do not
    wait and do not count. `cpulaunch tune --rate` gives another rate. Raises: ValueError.
    """
    import time

    from cpulaunch.worker.reporting.requests import serve

    return serve(rate, count, warm_up, clock=time.perf_counter, sleep=time.sleep)


def ready() -> None:
    """Effect: under `--start-barrier` waits until every worker of the launch is ready; else none."""
    from cpulaunch.worker.reporting.barrier import wait

    wait()
