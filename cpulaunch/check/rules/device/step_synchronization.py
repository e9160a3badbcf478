"""Calls that make the program wait for the GPU in every training step."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import (
    READS,
    inside,
    is_from_gpu,
    is_in_test,
    is_measuring,
    is_unconditional,
    moves_to_gpu,
    names_on_gpu,
    nearest_loop,
    root_name,
    training_loops,
)
from cpulaunch.check.source.program import ParsedProgram, is_of_self, method, receiver

EMPTY = ("torch.cuda.empty_cache", "torch.cuda.synchronize")
NUMBERS = ("float", "int", "bool")
SHAPING = (
    *(*NUMBERS, "round", "abs", "min", "max", "sum", "len", "sorted"),
    *("dict", "OrderedDict", "list", "tuple", "str", "repr", "format"),
)
"""Functions and methods that only make another number, text or list of numbers."""
SHAPING_FUNCTIONS = ("math.exp", "math.sqrt", "math.log", "numpy.array", "numpy.mean", "numpy.exp", "numpy.sqrt")
"""Functions of modules that do so."""
TEXTS = ("print", "str", "repr", "format")
"""Built-in functions that read the elements of a tensor, to make a number or a text of it."""
RECORDS = (
    *("append", "update", "add", "add_scalar", "log", "info", "debug", "set_postfix", "set_description", "writerow"),
    *("write", "extend"),
)
"""Methods that keep or show numbers."""
STAYING = ("detach", "mean", "sum", "clone")
"""Methods whose results are on the GPU too."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Reads of the loss, also by print or float, and empty_cache, in every turn of a training loop that uses a GPU."""
    for loop in training_loops(program):
        body = list(inside(program, loop))
        if not any(moves_to_gpu(program, node) for node in body) or is_in_test(program, loop):
            continue
        losses = {name for node in body if method(node) == "backward" for name in _differentiated(node)}
        tensors = losses - set(_read_before(body))
        on_gpu = names_on_gpu(program, loop) - set(_read_before(body))
        found: set[ast.AST] = set()
        for node in body:
            if not isinstance(node, ast.Call | ast.JoinedStr | ast.BinOp) or nearest_loop(program, node) is not loop:
                continue
            if not is_unconditional(program, node, loop) or not found.isdisjoint(program.around(node)):
                continue  # Within a finding another one says nothing new.
            name = program.called(node)
            if name in EMPTY and not (is_measuring(program, node) or _is_timed(program, node)):
                found.add(node)
                yield Hit(node=node, seen=f"{name} in every training step")
            elif _reads(program, node, losses, on_gpu) or _shows(program, node, tensors):
                found.add(node)
                yield Hit(node=node, seen=f"{ast.unparse(node)} waits for the GPU in every training step")


def _reads(program: ParsedProgram, node: ast.AST, losses: set[str], on_gpu: set[str]) -> bool:
    """Whether a call brings a loss, or a number of anything else on the GPU, to the CPU."""
    if method(node) not in READS or not isinstance(node, ast.Call) or _is_inner(program, node):
        return False
    if _read(receiver(node)) in losses:
        return True
    is_number = method(node) == "item" and _is_recorded(program, node)
    is_of_gpu = is_number and root_name(_innermost(program, node)) in on_gpu
    return is_of_gpu and is_from_gpu(program, receiver(node), on_gpu)


def _is_recorded(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a number is added to others, or logged, rather than needed by another call as an action is."""
    for each in program.around(node):
        if isinstance(each, ast.stmt):
            return isinstance(each, ast.AugAssign)
        name = method(each) or getattr(getattr(each, "func", None), "id", "")
        if isinstance(each, ast.Call) and (method(each) in RECORDS or name == "print"):
            return True
        is_of_module = program.called(each) in SHAPING_FUNCTIONS
        if isinstance(each, ast.Call) and name not in SHAPING and not is_of_module:
            return False
    return False


def _innermost(program: ParsedProgram, call: ast.Call) -> ast.AST | None:
    """What the first of a chain of methods is called on, as `(y == z)` in `(y == z).sum().item()`, or a part of it."""
    node: ast.AST | None = call
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript | ast.Compare | ast.BinOp | ast.UnaryOp):
        if isinstance(node, ast.Call):
            is_method = method(node) and not program.called(node)
            node = receiver(node) if is_method else node.args[0] if program.called(node) and node.args else None
        elif isinstance(node, ast.Compare | ast.BinOp):
            node = node.left
        else:
            node = node.operand if isinstance(node, ast.UnaryOp) else node.value
    return node


def _is_timed(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a clock is read in the statement before or after a node's: then the wait is a part of measuring."""
    statement = next((each for each in program.around(node) if isinstance(each, ast.stmt)), None)
    block = getattr(program.parents[statement], "body", []) if statement is not None else []
    if not isinstance(block, list) or statement not in block:
        return False
    place = block.index(statement)
    near = [*block[max(0, place - 1) : place], *block[place + 1 : place + 2]]
    return any(program.called(part).startswith("time.") for each in near for part in ast.walk(each))


def _differentiated(backward: ast.AST) -> Iterator[str]:
    """The variables of which a call of backward takes the gradient, also by way of a gradient scaler."""
    waiting: list[ast.AST | None] = [receiver(backward)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.BinOp):
            waiting += [node.left, node.right]
        elif isinstance(node, ast.Call) and method(node) == "scale" and node.args:
            waiting.append(node.args[0])
        elif _read(node):
            yield _read(node)


def _read(node: ast.AST | None) -> str:
    """The variable, or the attribute of self, that an expression is made of on the GPU; empty if it is of neither."""
    while True:
        if isinstance(node, ast.Call) and method(node) in (*STAYING, *READS):
            node = receiver(node)
        elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
            node = node.value
        else:
            return ast.unparse(node) if isinstance(node, ast.Name) or (node is not None and is_of_self(node)) else ""


def _read_before(body: list[ast.AST]) -> Iterator[str]:
    """The variables, and attributes of self, to which a loop assigns what it has read: they may hold numbers."""
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(method(each) in READS or _is_builtin(each, NUMBERS) for each in ast.walk(node.value)):
                yield from (ast.unparse(each) for target in targets for each in ast.walk(target) if _read(each))


def _shows(program: ParsedProgram, node: ast.AST, tensors: set[str]) -> bool:
    """Whether an expression makes a number or a text of the elements of one of these variables."""
    shown: list[ast.expr] = []
    if isinstance(node, ast.JoinedStr):
        shown = [each.value for each in node.values if isinstance(each, ast.FormattedValue)]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _is_text(node.left):
        shown = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
    elif isinstance(node, ast.Call) and method(node) == "format" and _is_text(receiver(node)):
        shown = [*node.args, *(word.value for word in node.keywords)]
    elif isinstance(node, ast.Call) and _is_builtin(node, NUMBERS + TEXTS) and program.value(node.func) is node.func:
        shown = [] if program.called(node) else node.args
    return any(_is_tensor(each, tensors) for each in shown)


def _is_builtin(node: ast.AST, names: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_tensor(node: ast.AST | None, tensors: set[str]) -> bool:
    """Whether an expression is one of these variables, or a tensor made of it on the GPU."""
    while True:
        if isinstance(node, ast.Call) and method(node) in STAYING and not node.args:
            node = receiver(node)
        elif isinstance(node, ast.Attribute) and node.attr == "data":
            node = node.value
        else:
            return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in tensors


def _is_inner(program: ParsedProgram, node: ast.expr) -> bool:
    """Whether another read follows, as in loss.cpu().data.item(): one finding is enough."""
    parent = program.parents[node]
    while isinstance(parent, ast.Attribute | ast.Subscript) or (
        isinstance(parent, ast.Call) and method(parent) in (*STAYING, *READS)
    ):
        if isinstance(parent, ast.Attribute) and parent.attr in READS:
            return True
        parent = program.parents[parent]
    return False


def _loop(last: str, *, gpu: str = "x.cuda()") -> str:
    head = "for i, x in enumerate(loader):\n    loss = net"
    return f"{head}({gpu}).sum()\n    loss.backward()\n    opt.step()\n    {last}\n"


RULE = Rule(
    id="step-synchronization",
    summary="Every training step waits for the GPU",
    why="loss.item() and the like wait until the GPU has finished the step; only then does Python start to launch the "
    "next one, and the GPU idles. print(loss), float(loss) and f'{loss}' read it too. empty_cache also returns memory "
    "that the next step asks for again.",
    fix="Add up loss.detach() on the GPU and read it every n steps; leave out empty_cache and synchronize.",
    find=find,
    wrong=(
        _loop("total += loss.item()  # <-"),
        _loop("losses.append(loss.detach().cpu())  # <-"),
        _loop("print(i, loss.item())  # <-"),
        _loop("torch.cuda.empty_cache()  # <-"),
        _loop("total += loss.item()  # <-", gpu="x.to('cuda')"),
        "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
        + _loop("bar.set_postfix(loss=loss.item())  # <-", gpu="x.to(device)"),
        _loop("total += loss[0].detach().mean().item()  # <-"),
        "from collections import OrderedDict\nfor x in loader:\n    hits = net(x.cuda())\n    hits.sum().backward()\n"
        "    opt.step()\n    bar.set_postfix(OrderedDict(hits=hits[0].item()))  # <-\n",
        "import numpy as np\nfor x in loader:\n    hits = net(x.cuda())\n    hits.sum().backward()\n"
        "    opt.step()\n    found.append(np.mean(hits[0].item()))  # <-\n",
        "for x, y in loader:\n    x, y = x.cuda(), y.cuda()\n    out = net(x)\n    loss_of(out, y).backward()\n"
        "    opt.step()\n    hits += (out.argmax(1) == y).sum().item()  # <-\n",
        "for x, y in loader:\n    y = y.cuda()\n    out = net(x.cuda())\n    loss_of(out, y).backward()\n"
        "    opt.step()\n    hits += torch.sum(torch.argmax(out, 1) == y).item()  # <-\n",
        _loop("total += loss.cpu().data.numpy()[0].item()  # <-"),
        _loop("print(self.loss)  # <-").replace("loss = net", "self.loss = net").replace("loss.b", "self.loss.b"),
        _loop("print(i, loss)  # <-"),
        _loop("total += float(loss)  # <-"),
        _loop("bar.set_description(f'loss {loss:.3f}')  # <-"),
        _loop("print('step %d: %f' % (i, loss.detach()))  # <-"),
        _loop("log.info('loss {:.3f}'.format(loss.data))  # <-"),
        _loop("print(f'{loss:.3f}', loss)  # <-"),
        "for x, y in loader:\n    y = y.cuda()\n    out = net(x.cuda())\n    loss_of(out, y).backward()\n"
        "    opt.step()\n    hits.append(round(float((out.argmax(1) == y).sum().item()), 3))  # <-\n",
        _loop("loss = loss.item()  # <-\n    print(f'{loss:.3f}')"),
        _loop("total += loss.item()  # <-").replace("loss.backward()", "scaler.scale(loss / 4).backward()"),
    ),
    right=(
        _loop("total += loss.detach()"),
        _loop("total += loss.item()", gpu="x"),
        _loop("total += loss.item()", gpu="x.to(device)"),
        _loop("if i % 100 == 0:\n        print(loss.item())"),
        _loop("total += other.item()"),
        _loop("pass") + "print(loss.item())\n",
        "for x in loader:\n    loss = net(x.cuda())\n    total += loss.item()\n",
        "device = torch.device('cpu')\n" + _loop("total += loss.item()", gpu="x.to(device)"),
        _loop("log(lambda: loss.item())"),
        _loop("total += self.hits.item()").replace("loss.b", "self.loss.b"),
        _loop("model.cpu()").replace("loss.b", "model.loss_of(x).b"),
        _loop("print(i, loss)", gpu="x"),
        _loop("print(f'{loss.shape} {loss.requires_grad}')"),
        _loop("if i % 100 == 0:\n        print(f'{loss:.3f}')"),
        _loop("log.debug('loss %s', loss)"),
        _loop("print('epoch %d' % i)"),
        "from mine import float\n" + _loop("total += float(loss)"),
        "def test_training(loader):\n    for x in loader:\n        loss = net(x.cuda())\n        loss.backward()\n"
        "        opt.step()\n        print(loss)\n",
        "def benchmark(loader):\n    for x in loader:\n        net(x.cuda()).sum().backward()\n        opt.step()\n"
        "        torch.cuda.synchronize()\n",
        _loop("count += x.size(0)"),
        _loop("count += y.sum().item()"),
        _loop("y = loss.detach().cpu().sum()  # cpulaunch: ignore\n    count += y.item()"),
        _loop("count += score(x).item()"),
        "for x, y in loader:\n    action = net(x.cuda()).argmax().item()\n    loss_of(world.step(action)).backward()\n"
        "    opt.step()\n",
        "for x, y in loader:\n    out = net(x.cuda())\n    loss_of(out, y).backward()\n    opt.step()\n"
        "    rewards.append(world.act(out.argmax().item()))\n    total += world.act(out.argmin().item())\n"
        "    rewards.append(list(map(world.act, [out.argmax().item()])))\n"
        "    total += world.mean(out.argmax().item())\n",
        "import time\n" + _loop("torch.cuda.synchronize()\n    end = time.time()"),
        "from time import perf_counter\n" + _loop("start = perf_counter()\n    torch.cuda.synchronize()"),
        "def step(loss):\n    loss.backward()\n    return loss.item()\n",
    ),
)
