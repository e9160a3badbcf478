"""A data set that decodes a file for every item."""

import ast
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import dataset_classes, methods
from cpulaunch.check.source.decoders import DECODERS, is_cached
from cpulaunch.check.source.flow import inside
from cpulaunch.check.source.program import ParsedProgram


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Decoders of images and sound in `__getitem__` of a data set that keeps nothing."""
    for owner in dataset_classes(program):
        function = methods(owner).get("__getitem__")
        if function is None or is_cached(program, function):
            continue
        for node in inside(program, function):
            name = program.called(node)
            if isinstance(node, ast.Call) and name in DECODERS:
                yield Hit(node=node, seen=f"{name} decodes a file for every item of every epoch")


def _dataset(line: str, base: str = "Dataset") -> str:
    head = "import cv2\nimport librosa\nimport torchaudio\nfrom PIL import Image\n\n"
    return f"{head}class Data({base}):\n    def __getitem__(self, index):\n        {line}\n        return item\n"


RULE = Rule(
    id="decode-per-item",
    summary="A data set decodes a file for every item",
    why="JPEG, PNG or FLAC files are decoded again in every epoch, by the CPU. If the data set fits into memory, or "
    "the CPU is the bottleneck, decoding once and keeping uint8 arrays takes this work away. The source does not "
    "say whether it fits: `cpulaunch diagnose` measures whether training waits for data.",
    fix="Decode once: keep uint8 arrays in memory or in a memory-mapped file; else use more workers, or a faster "
    "decoder (torchvision.io, with decoding at a smaller scale).",
    find=find,
    is_default=False,
    wrong=(
        _dataset("item = Image.open(self.paths[index])  # <-"),
        _dataset("item = cv2.imread(self.paths[index])  # <-"),
        _dataset("item = self.transform(Image.open(self.paths[index]).convert('RGB'))  # <-"),
        _dataset("item, rate = torchaudio.load(self.paths[index])  # <-"),
        _dataset("item = librosa.load(self.paths[index])[0]  # <-", base="torch.utils.data.Dataset"),
        "from torchvision.io import read_image\n" + _dataset("item = read_image(self.paths[index])  # <-"),
    ),
    right=(
        _dataset("item = self.items[index]"),
        _dataset("item = Image.open(self.paths[index])", base="object"),
        _dataset("item = self.open(self.paths[index])"),
        _dataset("item = Image.fromarray(self.items[index])"),
        _dataset("item = open(self.paths[index]).read()"),
        _dataset("item = self.cache[index] = Image.open(self.paths[index])"),
        _dataset("item = Image.open(self.paths[index])").replace("    def", "    @cached\n    def"),
        _dataset("item = Image.open(self.paths[index])").replace("__getitem__", "show"),
        "from PIL import Image\nitem = Image.open('a.png')\n",
        _dataset("item = torch.from_numpy(self.items[index])"),
        "from mine import Image\nclass Data(Dataset):\n    def __getitem__(self, index):\n"
        "        return Image.open(index)\n",
    ),
)
