"""The options of the commands that measure, as rows."""

from __future__ import annotations

from cpulaunch.cli.help.options import Option

GROUP = "Options"
HELP = Option(shown="--help", short=("-h",), text="show the help", group=GROUP)


def _option(shown: str, metavar: str, text: str) -> Option:
    return Option(shown=shown, metavar=metavar, text=text, group=GROUP)


FILES = (
    _option("--html", "FILE", "write a page for a browser: verdict, all samples, what the launches differ in"),
    _option("--svg", "FILE", "write the plots as an SVG picture (needs cpulaunch[plots])"),
    _option("--png", "FILE", "write the plots as a PNG picture (needs cpulaunch[plots])"),
)

COMPARE = (
    _option(
        "--metric",
        "NAME|REGEX",
        "compare this metric of cpulaunch.metric(), or the number that the pattern's group finds in the output "
        "(default: the first metric that all sides report, else the wall time)",
    ),
    _option("--wall-time", "", "compare how long the launches take"),
    _option("--lower-is-better", "", "less of the metric is better (default: by its name and unit)"),
    _option("--higher-is-better", "", "more of the metric is better"),
    _option("--until", "PERCENT", "stop once the interval is this narrow on both sides of the ratio (default: 2%)"),
    _option("--rounds", "N", "stop after N rounds, at most 200 (default: 40)"),
    _option("--budget", "SECONDS", "begin no round that would end later than this (default: 1800)"),
    _option("--fail-if-slower", "", "exit code 1 if a side is slower, or worse, than the first one"),
    _option("--json", "", "print JSON and nothing else"),
    *FILES,
    HELP,
)

TUNE = (
    _option("--minutes", "M", "end within about M minutes, the final round included (default: 30)"),
    _option("--trials", "N", "try at most N configurations, earlier ones of a resumed search included (default: 40)"),
    _option("--fresh", "", "forget the trials of an earlier search (default: go on with it)"),
    _option(
        "--vary",
        "NAME[=VALUE,...]",
        "search among these settings only, or these values of one; may be repeated (default: all that can matter)",
    ),
    _option("--fix", "NAME,...", "leave these settings as they are; those of options that are given are fixed anyway"),
    _option(
        "--max-error",
        "E",
        "allow settings that change numerics, and outputs that differ from plain Python's by this relative error",
    ),
    _option("--output", "FILE", "compare this file, which the program writes, with what plain Python writes"),
    _option("--metric", "NAME|REGEX", "make this figure best, as in compare"),
    _option("--wall-time", "", "make the launches short"),
    _option("--lower-is-better", "", "less of the metric is better (default: by its name and unit)"),
    _option("--higher-is-better", "", "more of the metric is better"),
    _option("--throughput", "", "vary the number of instances, too: the metric is summed over them"),
    _option("--dist", "", "vary ranks per host, backend of collectives and DDP's buckets, on a job of ranks"),
    _option("--latency", "", "make the 95th percentile of the latencies short that cpulaunch.requests() reports"),
    _option("--rate", "R", "let cpulaunch.requests() hand out R requests per second (default: as the program says)"),
    _option("--timeout", "SECONDS", "end a launch after so long (default: three times the default's time, and 60 s)"),
    _option("--save", "NAME|FILE", "the profile to write (default: SCRIPT-tuned, among your own profiles)"),
    _option("--json", "", "print JSON and nothing else"),
    *FILES,
    HELP,
)

DIAGNOSE = (
    _option("--steps", "N", "measure so many steps, of which the profiler sees few (default: 20)"),
    _option("--warm-up", "N", "steps that do not count (default: 5)"),
    _option("--budget", "SECONDS", "end the program after this time (default: 1800)"),
    _option("--trace", "FILE", "write the profiler's trace of a few steps, for chrome://tracing or Perfetto"),
    _option("--html", "FILE", "write a page for a browser: verdict, shares of a step, operations, ranks"),
    _option("--compare", "FILE", "launch nothing: say what changed from this file of --json to the one that follows"),
    _option("--to-end", "", "let the program run to its end (default: it ends when its steps have been measured)"),
    _option("--defaults", "", "launch it with cpulaunch's defaults (default: by Python alone, if no option is given)"),
    _option("--json", "", "print JSON and nothing else"),
    HELP,
)

OWN_OPTIONS = {"compare": COMPARE, "tune": TUNE, "diagnose": DIAGNOSE}
"""Command -> its options, where they are not those of a launch."""
