"""cpulaunch: run any PyTorch program at a CPU server's best, unedited, and see why."""

__version__ = "0.1.0"


def metric(name: str, value: float) -> None:
    """Effect: the launch's report holds this figure; the last of each name counts, summed over the workers.

    Without a launch that wants figures (`--report`, `--metric`) nothing happens.
    Raises: TypeError or ValueError if the name is not a line of text, or the value not a finite number.
    """
    from cpulaunch.worker.reporting.events import report_metric

    report_metric(name, value)


def ready() -> None:
    """Effect: under `--start-barrier` waits until every worker of the launch is ready; else none."""
    from cpulaunch.worker.reporting.barrier import wait

    wait()
