"""The commands as rows: what each does, in a few words, in a line and in a paragraph."""

from __future__ import annotations

from cpulaunch.records.record import record


@record
class Command:
    """A command. `brief` fits beside another command's, empty: left out there; `usage` is what follows `cpulaunch`.

    `options`: what the help on one screen shows of the options of a launch; empty for commands that have none of them.
    `example`: a command line.
    """

    name: str
    brief: str
    summary: str
    usage: str
    text: str
    options: tuple[str, ...] = ()
    example: str = ""


MOST_USED = (
    *("--optimize", "--instances", "--cores-per-instance", "--cpus", "--numa-nodes", "--nproc-per-node"),
    *("--profile", "--env", "--log-dir", "--report"),
)
OF_PLANS = ("--brief", "--json", "--emit", "--sysroot", "--show-env", *MOST_USED[:4], "--profile")
OF_JOBS = (
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend"),
    *("--rdzv-endpoint", "--max-restarts", "--redirects", "--log-dir"),
)

COMMANDS = (
    Command(
        name="run",
        brief="run a program (the default)",
        summary="run a program (the default)",
        usage="[OPTIONS] SCRIPT | -m MODULE | --no-python PROGRAM [ARGS...]",
        text="Run an unmodified PyTorch program on the right cores and memory, and explain every choice.",
        options=MOST_USED,
    ),
    Command(
        name="torchrun",
        brief="",
        summary="run a job of ranks with torchrun's options; one rank by default",
        usage="torchrun [OPTIONS] SCRIPT [ARGS...]",
        text="Run a job of ranks with torchrun's command line, one rank by default, each rank on cores of its own. "
        "PET_* variables are read as by torchrun.",
        options=OF_JOBS,
    ),
    Command(
        name="plan",
        brief="show what run would do",
        summary="print what run would do, and why; start nothing",
        usage="plan [OPTIONS] SCRIPT [ARGS...]",
        text="Print what run would do with the same options, and why; start nothing.",
        options=OF_PLANS,
    ),
    Command(
        name="compare",
        brief="which options are faster",
        summary="launch a program with different options in turn, and say which are faster",
        usage="compare [OPTIONS] ['OPTIONS A' 'OPTIONS B' ... --] SCRIPT [ARGS...]",
        text="Launch a program with the options of each side in turn, round after round, and say how many times as "
        "fast each side is as the first one, with an interval that holds the true ratio with 95 % certainty; it may "
        "be looked at after every round. A side is a word in quotes: options of cpulaunch, '' for none, or python for "
        "Python alone. Without sides, python is compared with cpulaunch's defaults. The program reports its figure "
        "with cpulaunch.metric() or prints it (--metric); else its wall time counts.",
        example="cpulaunch compare python -O2 '-O3 --instances 2' -- infer.py --batch 8",
    ),
    Command(
        name="tune",
        brief="find the best options",
        summary="search for the options with which a program is fastest, and write them to a profile",
        usage="tune [OPTIONS] SCRIPT [ARGS...]",
        text="Launch a program again and again with other settings: instances, threads, allocator, OpenMP runtime, "
        "graphs, weights and so on. What is best is measured again, in turn with the default, before it is claimed, "
        "and written to a profile that --profile takes. Options of a launch are those of every launch, and stay fixed. "
        "Settings that change numerics are tried with --max-error only. A search that was ended goes on where it was. "
        "Needs the extra: pip install 'cpulaunch[tune]'.",
        example="cpulaunch tune --minutes 10 --max-error 0.01 infer.py --batch 8",
    ),
    Command(
        name="diagnose",
        brief="name its bottleneck",
        summary="run some steps of a program, and name what slows it down",
        usage="diagnose [OPTIONS] [OPTIONS OF A LAUNCH] SCRIPT [ARGS...]",
        text="Run some steps of an unmodified program, see where their time goes, and name the first bottleneck in a "
        "sentence: what it is, how much of a step it takes, the option or the rule of check that addresses it, and how "
        "many times as fast steps would be without it, at most. A step ends with a step of the optimizer, or with a "
        "call of a module. Without options of a launch, Python alone runs the program, so that what cpulaunch's "
        "defaults bring is found too; with them, cpulaunch runs it. Options of diagnose come first. Of two diagnoses "
        "that --json wrote, --compare says which parts of a step grew and which shrank.",
        example="cpulaunch diagnose train.py --epochs 1",
    ),
    Command(
        name="probe",
        brief="show this machine",
        summary="show this machine: cores, caches, NUMA nodes, limits, libraries",
        usage="probe [OPTIONS]",
        text="Show a machine: cores, caches, NUMA nodes, limits, libraries.",
    ),
    Command(
        name="calibrate",
        brief="",
        summary="measure for seconds what this machine does with its torch",
        usage="calibrate [OPTIONS]",
        text="Measure for about ten seconds what this machine does with its torch: matrix products, memory, "
        "allocators, OpenMP runtimes, collectives. probe shows the figures, auto choices and pages (--html) use them.",
    ),
    Command(
        name="profiles",
        brief="",
        summary="list, show or validate profiles",
        usage="profiles COMMAND",
        text="List, show or validate profiles.",
    ),
    Command(
        name="doctor",
        brief="check this machine",
        summary="check this machine and its Python environment",
        usage="doctor [OPTIONS]",
        text="Check this machine and its Python environment; for every problem, show why it matters and how to fix it.",
    ),
    Command(
        name="check",
        brief="check a program",
        summary="find in a program's source what makes it slow",
        usage="check [OPTIONS] PATH...",
        text="Read PyTorch programs and notebooks, without running them, and report what makes them slow: where, why, "
        "and the fix. Needs the extra: pip install 'cpulaunch[check]'. Exit code: 0 nothing found, 1 findings, 2 an "
        "invalid command line or a file that could not be checked.",
        example="cpulaunch check --fix train.py",
    ),
    Command(
        name="translate",
        brief="",
        summary="print what another launcher's command line is in cpulaunch",
        usage="translate 'COMMAND LINE'",
        text="Print the command line of cpulaunch that does what another launcher's does, and start nothing: ipexrun, "
        "run_cpu, torchrun, numactl, taskset, mpirun, accelerate launch and deepspeed. What differs is said on stderr.",
        example="cpulaunch translate 'numactl -C 0-3 -m 0 python a.py'",
    ),
    *(
        Command(
            name=tool,
            brief="",
            summary=f"run a command line of {tool}",
            usage=f"{tool} [OPTIONS] SCRIPT [ARGS...]",
            text=f"Run a command line of {tool}. What its options are in cpulaunch is said on stderr, unless "
            "--quiet-migration is given; cpulaunch's own options may be among them. The exit code is the program's.",
            example=f"cpulaunch {tool} --ninstances 2 infer.py",
        )
        for tool in ("ipexrun", "run_cpu")
    ),
    Command(
        name="completion",
        brief="",
        summary="print the shell completion for bash, zsh or fish",
        usage="completion bash|zsh|fish",
        text="Print the completion of cpulaunch's command line for a shell, which starts no Python when it completes.",
        example='cpulaunch completion zsh >"${fpath[1]}/_cpulaunch"',
    ),
)


def command_named(name: str) -> Command:
    """The command of this name. Raises: KeyError."""
    return {command.name: command for command in COMMANDS}[name]
