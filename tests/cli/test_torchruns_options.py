"""torchrun's own argument parser against ours: every spelling it has, and what it makes of the same words."""

import pytest

from cpulaunch.cli.arguments import SWITCHES, canonical, parse_command_line, setting_of
from cpulaunch.records.settings import Settings
from tests.cli.test_pet_variables import TABLE

pytestmark = pytest.mark.torch

DIFFERENT = {"nproc_per_node", "nnodes", "rdzv_backend", "rdzv_id", "node_rank", "master_addr", "signals_to_handle"}
"""Defaults that mean the same, where None means "not chosen"."""

THEIRS_ALONE = ("print_completion",)
"""Options about torchrun itself: its own completions for a shell, since torch 2.15."""


def torchruns_parser():
    parser = pytest.importorskip("torch.distributed.run", reason="torch is not installed").get_args_parser()
    if not any(action.dest == "shutdown_timeout" for action in parser._actions):
        pytest.skip("torchrun's options are those of torch 2.13, and this one is older")
    return parser


def test_every_spelling_of_torchruns_options_is_accepted():
    actions = [action for action in torchruns_parser()._actions if action.dest not in THEIRS_ALONE]
    spellings = [each for action in actions for each in action.option_strings]
    assert len(spellings) > 50
    for spelling in spellings:
        flag = canonical(spelling)
        assert flag in SWITCHES or setting_of(flag)[0].flag == flag


def test_defaults_equal_torchruns():
    parser = torchruns_parser()
    ours = Settings()
    for action in parser._actions:
        name = action.dest
        if name in DIFFERENT or not hasattr(ours, name):
            continue
        value = getattr(ours, name)
        assert value == action.default or (not value and action.default in ("", "0", None, [])), name
    assert ",".join(ours.signals_to_handle) == parser.get_default("signals_to_handle")


@pytest.mark.parametrize(
    "words",
    [
        "--nproc-per-node=2 x.py --nnodes 3",
        "--nproc-p 2 --max_r 3 x.py",
        "--rdzv-ba c10d --rdzv_en host:1 --rdzv_i 7 x.py",
        "-r3 -t 0:1,1:2 --log_d logs x.py",
        "--rol a --monitor-i 5 x.py",
        "--run-p --start_m fork x.py",
        "--virtual-l --shutdown-t 4 --local-a 10.0.0.1 x.py",
        "-m pkg.mod a b",
        "--no-p cmd a -m",
        "--master-a h --master-p 5 --node-r 0 x.py",
    ],
)
def test_arguments_are_parsed_as_by_torchrun(words):
    theirs = torchruns_parser().parse_args(words.split())
    line = parse_command_line(words.split(), interpreter="python", torchrun=True)
    assert line.program is not None
    assert (line.program.target, list(line.program.args)) == (theirs.training_script, theirs.training_script_args)
    assert ("--module" in line.switches, "--no-python" in line.switches) == (theirs.module, theirs.no_python)
    for name, value in line.values.items():
        written = str(getattr(theirs, name))
        row, _ = setting_of("--" + name)
        assert value == (row.value_type.from_text(written) if not row.value_type.flag else written == "True"), name


OURS_ALONE = ("numa_binding",)
"""Options that have a variable here and none with torchrun."""
NEWER = ("log_line_prefix_template",)
"""Options that torchrun has had since torch 2.15."""


def test_variables_are_read_as_by_torchrun(monkeypatch):
    """Its parser reads them from the environment when it is made."""
    usual = vars(torchruns_parser().parse_args(["x.py"]))
    absent = {*OURS_ALONE, *(name for name in NEWER if name not in usual)}
    names = {name: (variable, text) for variable, text, name, _ in TABLE if name not in absent}
    for variable, text in names.values():
        monkeypatch.setenv(variable, text)
    read = vars(torchruns_parser().parse_args(["x.py"]))
    assert [name for name in names if read[name] == usual[name]] == []
