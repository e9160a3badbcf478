"""What names refer to in a program: only where one assignment decides it."""

import ast

import pytest

from cpulaunch.check.source.flow import is_on_gpu, is_unconditional
from cpulaunch.check.source.program import ParsedProgram


def last_value(text: str) -> str:
    """What the last expression of a program was assigned from."""
    program = ParsedProgram(text)
    last = [node for node in program.nodes if isinstance(node, ast.Expr)][-1]
    value = program.value(last.value)
    return program.dotted(value) or (ast.unparse(value) if value else "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x = 1\nx", "1"),
        ("x = 1\nx = 2\nx", "2"),
        ("x = 1\nx = x + 1\nx = x + 2\nx", "x + 2"),
        ("x = 1\nif y:\n    x = 2\nx", "x"),
        ("x = 1\nif y:\n    x = 2\n    x", "2"),
        ("x = 1\nx = 2\nif y:\n    x", "2"),
        ("x = 1\nif y:\n    x = f(x)\nelse:\n    x = 2\n    x", "2"),
        ("x = 1\nif y:\n    x\n    x = 3", "1"),
        ("x = 1\nwith y:\n    x\n    x = 3", "1"),
        ("x = 1\nfor i in y:\n    if i:\n        x\n        x = 3", "x"),
        ("x = 1\nif (x := 2):\n    x", "x"),
        ("x = 1\nx = 2\nfor i in y:\n    x\n    x = 3", "x"),
        ("x = 1\nx = 2\nfor x in y: pass\nx", "x"),
        ("x = 1\nx = 2\nwhile (z := x):\n    x = 3\nz", "x"),
        ("x = 1\ntry:\n    x = 2\nexcept E:\n    x", "x"),
        ("x = 1\nx = 2\nwith y as x:\n    x", "x"),
        ("x = 1\nx = 2\ndel x\nx", "x"),
        ("x = 1\nx, y = 2, 3\nx", "x"),
        ("x = 1\nx = 2\nimport x\nx", "x"),
        ("def f(x):\n    x = 2\n    x", "2"),
        ("def f(x):\n    x\n    x = 2", "x"),
        ("x = 1\nx = 2\ndef f():\n    x", "x"),
        ("x = 1\ndef f():\n    global x\n    x = 2\nx = 3\nx", "x"),
        ("x = 1\nx += 2\nx", "x"),
        ("x = 1\nfor x in y: pass\nx", "x"),
        ("x = 1\ndef f():\n    x", "1"),
        ("x = 1\ndef f():\n    global x\n    x = 2\nx", "x"),
        ("def f():\n    global x\n    x = 2\nx", "2"),
        ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2\n    x", "x"),
        ("x = 1\nmatch y:\n    case [1, x]: pass\nx", "x"),
        ("x = 1\nmatch y:\n    case [*x]: pass\nx", "x"),
        ("x = 1\nmatch y:\n    case {'a': 1, **x}: pass\nx", "x"),
        ("def g(): f(1, 2)\ndef f(a, b):\n    b", "2"),
        ("def g(): f(b=2, a=1)\ndef f(a, b):\n    a", "1"),
        ("def g(): f(1), f(2)\ndef f(a):\n    a", "a"),
        ("def g(): f(1), call(f)\ndef f(a):\n    a", "a"),
        ("def g(): f(*x)\ndef f(a):\n    a", "a"),
        ("def g(): f()\ndef f(a=3):\n    a", "a"),
        ("def g(): f(1)\nf = 3\ndef f(a):\n    a", "a"),
        ("def g(): Net(1, 2)\nclass Net:\n    def __init__(self, a, b):\n        b", "2"),
        ("def g(): Net(1)\nclass Net:\n    def run(self, a):\n        a", "a"),
        ("class Net:\n    def __init__(self):\n        self.a = 1\n    def run(self):\n        self.a", "1"),
        ("x = f(x)\nx", "f(x)"),
        ("x = f(x)\ndef g():\n    x", "f(x)"),
        ("import torch as t\nt.nn", "torch.nn"),
        ("from .torch import nn\nfrom torch import nn\nnn", "nn"),
        ("try:\n    from mine import nn\nexcept ImportError:\n    from torch import nn\nnn", "nn"),
        ("def f():\n    global nn\n    from torch import nn\nnn", "torch.nn"),
    ],
)
def test_values(text: str, value: str) -> None:
    assert last_value(text) == value


@pytest.mark.parametrize(
    "lines",
    [
        "device = torch.device(device)",
        "device = device if ok else 'cuda'",
        "device = torch.device(other)\nother = torch.device(device)",
        "device = other if a else b\nother = device if c else d",
    ],
)
def test_a_device_that_is_made_of_itself_is_followed_to_an_end(lines: str) -> None:
    program = ParsedProgram(f"import torch\nfrom settings import *\n{lines}\ndevice")
    last = [node for node in program.nodes if isinstance(node, ast.Expr)][-1]
    assert is_on_gpu(program, last.value) is ("cuda" in lines)


@pytest.mark.parametrize(
    ("test", "is_certain"),
    [
        ("__name__ == '__main__'", True),
        ("'__main__' == __name__", True),
        ("__name__ != '__main__'", False),
        ("__name__ == 'worker'", False),
        ("__name__ in names", False),
        ("name == '__main__'", False),
    ],
)
def test_only_the_main_branch_runs_whenever_the_program_does(test: str, is_certain: bool) -> None:
    program = ParsedProgram(f"if {test}:\n    run()")
    assert is_unconditional(program, program.calls[0], program.tree) is is_certain
