"""Calls that decode images, sound and video, and whether what they return is kept."""

import ast

from cpulaunch.check.source.flow import inside
from cpulaunch.check.source.program import ParsedProgram, is_of_self

IMAGES = (
    *("PIL.Image.open", "cv2.imread", "imageio.imread", "imageio.v2.imread", "imageio.v3.imread", "skimage.io.imread"),
    *("torchvision.io.read_image", "torchvision.io.decode_image", "torchvision.io.image.read_image"),
    *(
        "torchvision.datasets.folder.default_loader",
        "torchvision.datasets.folder.pil_loader",
        "matplotlib.image.imread",
    ),
)
OTHERS = ("torchaudio.load", "librosa.load", "soundfile.read", "torchvision.io.read_video", "pydicom.dcmread")
DECODERS = IMAGES + OTHERS


def is_cached(program: ParsedProgram, function: ast.FunctionDef) -> bool:
    """Whether a method keeps what it returns: it has a decorator, or stores items in an attribute of self."""
    if function.decorator_list:
        return True
    for node in inside(program, function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and is_of_self(node.value):
            return True
    return False
