"""Samples that are padded to a maximum length instead of the longest of their batch."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import dataset_classes
from cpulaunch.check.source.flow import is_in_test
from cpulaunch.check.source.program import FUNCTIONS, ParsedProgram, argument, is_constant, is_of_self, receiver

FIXED_SHAPES = re.compile(
    r"(?<!_)clip(?!_grad|\()|diffus|xla|tpu|onnx|torch\.compile|cudagraph|reduce-overhead", re.IGNORECASE
)
"""Words of programs in which a fixed length has its reasons: a text encoder of fixed length, compiled shapes."""

IMAGES = ("PIL", "torchvision", "cv2", "transformers.models.clip")
"""Programs that pair texts with images give a text encoder of fixed length what it was made for."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """padding="max_length" of a tokenizer, and lists filled up by hand, where a data set makes its samples."""
    if FIXED_SHAPES.search(program.text) or any(program.imports_module(each) for each in IMAGES):
        return
    owners = set(dataset_classes(program))
    for call in program.calls:
        is_padded = is_constant(argument(call, "padding"), "max_length") or is_constant(
            argument(call, "pad_to_max_length"), True
        )
        if is_padded and _is_tokenizer(call.func) and _makes_samples(program, call, owners):
            yield Hit(node=call, seen="every sample is padded to the maximum length")
    for node in program.nodes:
        if isinstance(node, ast.BinOp) and _fills_up(node) and _is_in_getter(program, node, owners):
            yield Hit(node=node, seen="every sample is filled up to the maximum length")


def _is_tokenizer(function: ast.expr) -> bool:
    """Whether a function, or what its method is called on, is named tokenizer."""
    names = [node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    names += [node.id for node in ast.walk(function) if isinstance(node, ast.Name)]
    return any("tokenizer" in name.lower() for name in names)


def _makes_samples(program: ParsedProgram, call: ast.Call, owners: set[ast.ClassDef]) -> bool:
    """Whether a call is in a data set, or in a function that map applies to one."""
    if is_in_test(program, call):
        return False
    if program.class_of(call) in owners:
        return True
    functions = [each for each in program.around(call) if isinstance(each, FUNCTIONS)]
    return not _mapped(program).isdisjoint(functions)


@lru_cache(maxsize=2)
def _mapped(program: ParsedProgram) -> frozenset[ast.AST | None]:
    """The functions that map applies to data sets."""
    return frozenset(program.value(each) for node in program.calls if _is_map(node) for each in node.args[:1])


def _is_map(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "map" and receiver(call) is not None


def _fills_up(node: ast.BinOp) -> bool:
    """`[pad] * (maximum - len(x))`: the maximum is an attribute of self, a name in capitals or a constant."""
    if not isinstance(node.op, ast.Mult) or not isinstance(node.left, ast.List) or len(node.left.elts) != 1:
        return False
    count = node.right
    if not isinstance(count, ast.BinOp) or not isinstance(count.op, ast.Sub) or not isinstance(count.right, ast.Call):
        return False
    is_length = isinstance(count.right.func, ast.Name) and count.right.func.id == "len"
    is_maximum = is_of_self(count.left) or isinstance(count.left, ast.Constant)
    return is_length and (is_maximum or (isinstance(count.left, ast.Name) and count.left.id.isupper()))


def _is_in_getter(program: ParsedProgram, node: ast.AST, owners: set[ast.ClassDef]) -> bool:
    function = program.function(node)
    return (
        isinstance(function, ast.FunctionDef)
        and function.name == "__getitem__"
        and program.class_of(function) in owners
    )


DATA = """class Data(Dataset):
    def __getitem__(self, index):
        {}
        return ids
"""
CALL = "ids = self.tokenizer(self.texts[index], truncation=True, max_length=512, padding={})"

RULE = Rule(
    id="padding-to-maximum",
    summary="Every sample is padded to the maximum length",
    why="A model computes as much for padding as for text. Samples padded to a maximum of 512 tokens of which 100 are "
    "used on average cost about five times what they need; padded to the longest of their batch they cost little more "
    "than needed. The rule is silent in programs where a fixed length has a reason: compilation, CLIP, TPUs, and texts "
    "with images.",
    fix="Pad each batch instead: transformers.DataCollatorWithPadding, or a collate_fn with "
    "torch.nn.utils.rnn.pad_sequence; group samples of similar length.",
    find=find,
    wrong=(
        DATA.format(CALL.format("'max_length'") + "  # <-"),
        DATA.format("ids = self.tokenizer.encode_plus(self.texts[index], pad_to_max_length=True)  # <-"),
        "def encode(batch):\n    return tokenizer(batch['text'], padding='max_length')  # <-\n\n"
        "data = data.map(encode, batched=True)\n",
        "data = data.map(lambda x: tokenizer(x['text'], padding='max_length', truncation=True))  # <-\n",
        DATA.format("ids = self.ids[index]\n        ids = ids + [0] * (self.max_length - len(ids))  # <-"),
        DATA.format(CALL.format("'max_length'") + "  # <-")
        + "nn.utils.clip_grad_norm_(net.parameters(), 1.0)\ntrainer = Trainer(gradient_clip_val=1.0)\n",
        "MAX_LEN = 128\n" + DATA.format("ids = self.ids[index]\n        ids += [0] * (MAX_LEN - len(ids))  # <-"),
    ),
    right=(
        DATA.format(CALL.format("True")),
        DATA.format(CALL.format("'longest'")),
        DATA.format(CALL.format("False")),
        DATA.format(CALL.format("padding")),
        "from PIL import Image\n" + DATA.format(CALL.format("'max_length'")),
        "ids = tokenizer('one text', padding='max_length')\n",
        "# for CLIP\n" + DATA.format(CALL.format("'max_length'")),
        "net = torch.compile(net)\n" + DATA.format(CALL.format("'max_length'")),
        DATA.format("ids = self.processor(self.images[index], padding='max_length')"),
        "def collate(batch):\n    longest = max(map(len, batch))\n"
        "    return [ids + [0] * (longest - len(ids)) for ids in batch]\n",
        DATA.format("ids = self.ids[index] + [0] * self.extra"),
        "def test_it():\n    data.map(lambda x: tokenizer(x, padding='max_length'))\n",
        "def encode(text):\n    return tokenizer(text, padding='max_length')\n\nnet(encode('one text'))\n",
    ),
)
