"""A data set that decodes every image and resizes it to the same size again in every epoch."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import dataset_classes, methods
from cpulaunch.check.source.decoders import DECODERS, is_cached
from cpulaunch.check.source.flow import inside
from cpulaunch.check.source.program import ParsedProgram, is_of_self, method, receiver

RESIZES = ("cv2.resize", "torchvision.transforms.functional.resize", "skimage.transform.resize")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Resizes to a size that does not depend on the item, of an image that the same `__getitem__` decodes."""
    for owner in dataset_classes(program):
        function = methods(owner).get("__getitem__")
        if function is None or is_cached(program, function):
            continue
        nodes = list(inside(program, function))
        decoded = {id(node) for node in nodes if program.called(node) in DECODERS}
        for node in nodes:
            image, size = _resized(program, node)
            if (
                isinstance(node, ast.Call)
                and image is not None
                and _source(program, image) in decoded
                and _is_fixed(program, size, function)
            ):
                yield Hit(node=node, seen="every item is decoded and resized to the same size again in every epoch")


def _resized(program: ParsedProgram, node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """What a call resizes, and to which size."""
    if not isinstance(node, ast.Call) or not node.args:
        return None, None
    if program.called(node) in RESIZES and len(node.args) > 1:
        return node.args[0], node.args[1]
    if method(node) == "resize" and not program.called(node):
        return receiver(node), node.args[0]
    return None, None


def _source(program: ParsedProgram, image: ast.AST | None) -> int:
    """The id of the call that an image comes from, through methods such as convert and assignments."""
    for _ in range(6):
        image = program.value(image)
        if not isinstance(image, ast.Call):
            return 0
        if program.called(image) in DECODERS:
            return id(image)
        first = image.args[0] if image.args else None
        image = first if program.called(image) == "cv2.cvtColor" else receiver(image)
    return 0


def _is_fixed(program: ParsedProgram, size: ast.expr | None, function: ast.FunctionDef) -> bool:
    """Whether a size is made of constants, attributes of self and names from outside of the method only."""
    if size is None:
        return False
    for node in ast.walk(size):
        if isinstance(node, ast.Call | ast.Subscript) or (isinstance(node, ast.Attribute) and not is_of_self(node)):
            return False
        if isinstance(node, ast.Name) and node.id != "self" and (function, node.id) in program.bindings:
            return False
    return True


def _dataset(lines: str, base: str = "Dataset") -> str:
    head = "import cv2\nfrom PIL import Image\n\n"
    body = "".join(f"        {line}\n" for line in lines.split("\n"))
    return f"{head}class Data({base}):\n    def __getitem__(self, index):\n{body}        return image\n"


RULE = Rule(
    id="resize-per-item",
    summary="Every image is decoded and resized to the same size again in every epoch",
    why="Decoding a large image and making it smaller costs milliseconds of a CPU for each sample of each epoch, and "
    "the result is always the same. It is often what the loaders' workers spend most of their time on.",
    fix="Resize the images once, before training, and store them at that size (as uint8 in one memory-mapped file, or "
    "as small JPEGs); keep only random augmentation in __getitem__.",
    find=find,
    wrong=(
        _dataset("image = Image.open(self.paths[index]).resize((224, 224))  # <-"),
        _dataset("image = Image.open(self.paths[index]).convert('RGB')\nsmall = image.resize(self.size)  # <-"),
        _dataset("raw = cv2.imread(self.paths[index])\nimage = cv2.resize(raw, (self.width, self.height))  # <-"),
        "SIZE = 64\n" + _dataset("raw = cv2.imread(self.paths[index])\nimage = cv2.resize(raw, (SIZE, SIZE))  # <-"),
        _dataset(
            "raw = cv2.cvtColor(cv2.imread(self.paths[index]), 4)\nimage = cv2.resize(raw, (512, 512))  # <-",
            base="torch.utils.data.Dataset",
        ),
        "import torchvision.transforms.functional as TF\n"
        + _dataset("raw = Image.open(self.paths[index])\nimage = TF.resize(raw, [256, 256])  # <-"),
    ),
    right=(
        _dataset("image = Image.open(self.paths[index])"),
        _dataset("image = self.images[index].resize((224, 224))"),
        _dataset("side = random.randint(64, 256)\nimage = Image.open(self.paths[index]).resize((side, side))"),
        _dataset("image = Image.open(self.paths[index])\nimage = image.resize((image.width // 2, image.height // 2))"),
        _dataset("image = Image.open(self.paths[index]).resize((224, 224))", base="object"),
        _dataset("image = Image.open(self.paths[index]).resize(self.sizes[index])"),
        _dataset("image = self.load(index).resize((224, 224))"),
        _dataset("image = self.transform(Image.open(self.paths[index]))"),
        _dataset("image = torch.zeros(3).resize((3, 1))"),
        _dataset(
            "if index not in self.cache:\n    self.cache[index] = Image.open(self.paths[index]).resize((224, 224))\n"
            "image = self.cache[index]"
        ),
        "import functools\n"
        + _dataset("image = Image.open(self.paths[index]).resize((224, 224))").replace(
            "    def", "    @functools.lru_cache\n    def"
        ),
        "from PIL import Image\ndef show(path):\n    return Image.open(path).resize((224, 224))\n",
    ),
)
