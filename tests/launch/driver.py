"""Run by the tests in a process of its own, which launch() takes over: runs the plan in a JSON file."""

import json
import os
import sys

from cpulaunch.launch.run import launch
from cpulaunch.launch.supervision.failure_text import summary
from cpulaunch.launch.supervision.report import report
from cpulaunch.records.errors import CpulaunchError
from cpulaunch.records.plan import LaunchOptions, LaunchPlan, WorkerPlan
from cpulaunch.view.plan_view import plan_json


def read_plan(described):
    workers = tuple(
        WorkerPlan(
            index=index,
            cpus=frozenset(worker.get("cpus", ())),
            numa_nodes=frozenset(worker.get("numa_nodes", ())),
            mempolicy=worker.get("mempolicy", "none"),
            threads=1,
            env=tuple((name, value) for name, value in worker.get("env", ())),
            argv=tuple(worker["argv"]),
        )
        for index, worker in enumerate(described["workers"])
    )
    options = described.get("launch", {})
    if options.get("show") is not None:
        options["show"] = frozenset(options["show"])
    return LaunchPlan(
        mode="single" if len(workers) == 1 else "instances",
        profile=None,
        world_size=len(workers),
        workers=workers,
        notes=(),
        warnings=(),
        launch=LaunchOptions(**options),
    )


def notify(text):
    os.write(2, f"cpulaunch: {text}\n".encode(errors="backslashreplace"))


def main(path):
    with open(path) as file:
        described = json.load(file)
    plan = read_plan(described)
    try:
        result = launch(plan, environ=os.environ, memory_events=described.get("memory_events"), notify=notify)
    except CpulaunchError as error:
        notify(f"error: {error}")
        return error.exit_code
    for line in summary(result):
        print(line, file=sys.stderr)
    if plan.launch.report is not None:
        with open(plan.launch.report, "w") as file:
            json.dump(report(plan, result, version="test", plan_json=plan_json(plan)), file)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
