"""A data set that decodes every image and resizes it to the same size again in every epoch."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import dataset_classes, loaders, methods
from cpulaunch.check.source.decoders import DECODERS, is_cached
from cpulaunch.check.source.flow import inside, is_in_test, iterated, training_loops
from cpulaunch.check.source.program import ParsedProgram, argument, is_of_self, method, receiver

RESIZES = ("cv2.resize", "torchvision.transforms.functional.resize", "skimage.transform.resize")
COMPOSE = re.compile(r"torchvision\.transforms\.(v2\.|transforms\.)?Compose")
TRANSFORM = re.compile(r"torchvision\.transforms\.(?:v2\.|transforms\.)?(\w+)")
SAME_ALWAYS = {"ToTensor", "PILToTensor", "ToImage", "ToPILImage", "Grayscale", "CenterCrop", "ToDtype"}
"""Transforms that give the same result for the same image in every epoch."""
FOLDERS = {
    f"torchvision.datasets.{name}"
    for name in (
        *("ImageFolder", "DatasetFolder", "ImageNet", "Food101", "Flowers102", "OxfordIIITPet", "StanfordCars"),
        *("Places365", "CelebA", "Caltech101", "Caltech256", "CocoDetection", "FGVCAircraft", "DTD", "SUN397"),
    )
}
"""Data sets of torchvision that decode a file for every item."""
ONCE = re.compile(r"test|val|eval|infer|predict|demo|query", re.IGNORECASE)
"""Names of data sets that a program goes through once."""
DRAWS = re.compile(r"(random|numpy\.random|torch\.rand)\b|torch\.rand(n|int|perm)?$|torch\.(bernoulli|multinomial)")
PARTS = re.compile(r"split|mode|phase|train|test|val", re.IGNORECASE)
"""Names that say for which part of the data a branch is."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Resizes to a size that does not depend on the item, of an image that a data set decodes for each item."""
    for loader in _trained(program):
        data = program.value(argument(loader, "dataset", 0))
        if isinstance(data, ast.Call) and program.called(data) in FOLDERS and not is_in_test(program, data):
            is_folder = program.called(data).endswith("ImageFolder")
            yield from _composed(program, argument(data, "transform", 1 if is_folder else None))
    for owner in dataset_classes(program):
        function = methods(owner).get("__getitem__")
        if function is None or is_cached(program, function):
            continue
        if not ONCE.search(owner.name) and (_trained(program) or not loaders(program)):
            yield from _transformed(program, function)
        nodes = list(inside(program, function))
        decoded = {id(node) for node in nodes if program.called(node) in DECODERS}
        for node in nodes:
            image, size = _resized(program, node)
            if (
                isinstance(node, ast.Call)
                and image is not None
                and _source(program, image) in decoded
                and _is_fixed(program, size, function)
                and not _is_for_a_part(program, node)
                and not _is_by_chance(program, node)
            ):
                yield Hit(node=node, seen="every item is decoded and resized to the same size again in every epoch")


def _is_for_a_part(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a node runs for one part of the data only, which may be the few images of a validation."""
    return any(isinstance(each, ast.If) and PARTS.search(ast.unparse(each.test)) for each in program.around(node))


def _is_by_chance(program: ParsedProgram, node: ast.AST) -> bool:
    """Whether a node runs for some items only, as a draw decides: the others need the whole image."""
    tests = [each.test for each in program.around(node) if isinstance(each, ast.If | ast.IfExp)]
    drawn = [program.value(part) for test in tests for part in ast.walk(test)]
    return any(DRAWS.match(program.called(each)) for value in drawn if value for each in ast.walk(value))


@lru_cache(maxsize=2)
def _trained(program: ParsedProgram) -> list[ast.Call]:
    """The DataLoaders that training loops run over, as far as data flow tells."""
    used = [program.value(each) for loop in training_loops(program) for each in iterated(program, loop)]
    return [call for call in loaders(program) if call in used]


def _transformed(program: ParsedProgram, function: ast.FunctionDef) -> Iterator[Hit]:
    """The resize in a transform that a method applies to what it decodes."""
    decoded = {id(node) for node in inside(program, function) if program.called(node) in DECODERS}
    for node in inside(program, function):
        if not isinstance(node, ast.Call) or len(node.args) != 1 or _source(program, node.args[0]) not in decoded:
            continue
        if not _is_by_chance(program, node) and not _is_for_a_part(program, node):
            yield from _composed(program, node.func)


def _composed(program: ParsedProgram, transform: ast.AST | None) -> Iterator[Hit]:
    """A Resize that nothing random is before, alone or in a Compose."""
    value = program.value(transform)
    steps: list[ast.expr] = [value] if isinstance(value, ast.Call) else []
    if isinstance(value, ast.Call) and COMPOSE.fullmatch(program.called(value)):
        listed = program.value(argument(value, "transforms", 0))
        steps = listed.elts if isinstance(listed, ast.List | ast.Tuple) else []
    for each in steps:
        step = program.value(each)
        found = TRANSFORM.fullmatch(program.called(step))
        if found is not None and found[1] == "Resize" and isinstance(step, ast.Call):
            yield Hit(node=step, seen="every image is decoded and resized to the same size again in every epoch")
            return
        if found is None or found[1] not in SAME_ALWAYS:
            return


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


FOLDER = """from torchvision import datasets, transforms

transform = transforms.Compose([
    {}
    transforms.RandomHorizontalFlip(),
    transforms.ToTensor(),
])
data = datasets.ImageFolder('train', transform)
loader = DataLoader(data, 32, num_workers=4)
"""
TRAINED = "for x, y in loader:\n    loss_of(net(x), y).backward()\n    opt.step()\n"
RESIZE = "transforms.Resize((224, 224)),"
OWN = """from PIL import Image
from torchvision import transforms

class Data(Dataset):
    def __init__(self, paths):
        self.paths = paths
        self.transform = transforms.Compose([transforms.Resize(224), transforms.ToTensor()])@

    def __getitem__(self, index):
        return self.transform(Image.open(self.paths[index]).convert('RGB'))
"""


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
        FOLDER.format(RESIZE + "  # <-") + TRAINED,
        FOLDER.format("transforms.ToPILImage(),\n    transforms.Resize(size),  # <-") + TRAINED,
        FOLDER.format(RESIZE + "  # <-").replace("'train', transform", "'train', transform=transform") + TRAINED,
        OWN.replace("@", "  # <-"),
        OWN.replace("@", "  # <-") + "\nloader = DataLoader(Data(paths), 32)\n" + TRAINED,
    ),
    right=(
        _dataset("image = Image.open(self.paths[index])"),
        _dataset("image = self.images[index].resize((224, 224))"),
        _dataset("side = random.randint(64, 256)\nimage = Image.open(self.paths[index]).resize((side, side))"),
        _dataset("image = Image.open(self.paths[index])\nimage = image.resize((image.width // 2, image.height // 2))"),
        _dataset("image = Image.open(self.paths[index]).resize((224, 224))", base="object"),
        _dataset("image = Image.open(self.paths[index]).resize(self.sizes[index])"),
        _dataset("image = self.load(index).resize((224, 224))"),
        _dataset(
            "if self.split == 'train':\n    return self.rays[index]\n"
            "else:\n    image = Image.open(self.paths[index]).resize((224, 224))"
        ),
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
        FOLDER.format(RESIZE),
        FOLDER.format("transforms.RandomResizedCrop(224),\n    " + RESIZE) + TRAINED,
        FOLDER.format("transforms.RandomResizedCrop(224),") + TRAINED,
        FOLDER.format(RESIZE).replace("datasets.ImageFolder", "mine.ImageFolder") + TRAINED,
        FOLDER.format(RESIZE).replace("ImageFolder('train', transform)", "CIFAR10('d', True, transform)") + TRAINED,
        FOLDER.format(RESIZE) + TRAINED.replace("    opt.step()\n", ""),
        OWN.replace("@", "").replace("class Data", "class TestData"),
        OWN.replace("@", "").replace(
            "        return self.transform(Image.open(self.paths[index]).convert('RGB'))",
            "        image = Image.open(self.paths[index])\n        if torch.rand(1) < 0.5:\n"
            "            image = self.transform(image)\n        return image",
        ),
        OWN.replace("@", "").replace(
            "        return self.transform(Image.open(self.paths[index]).convert('RGB'))",
            "        image = Image.open(self.paths[index])\n        if self.train:\n            return crop(image)\n"
            "        else:\n            return self.transform(image)",
        ),
        "import random\n"
        + _dataset(
            "image = Image.open(self.paths[index])\nchance = random.random()\nif chance < self.chance:\n"
            "    image = image.resize((224, 224))\nelse:\n    image = image.crop(box_of(chance))"
        ),
        OWN.replace("@", "").replace("Image.open(self.paths[index])", "self.images[index]"),
        OWN.replace("@", "") + "\nfor x in DataLoader(Data(paths)):\n    net(x)\n",
        "from PIL import Image\ndef show(path):\n    return Image.open(path).resize((224, 224))\n",
    ),
)
