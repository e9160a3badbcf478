"""A large network that is trained on a GPU in plain float32."""

import re
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside, is_in_test, moves_to_gpu, training_loops
from cpulaunch.check.source.models import called_modules, is_large
from cpulaunch.check.source.program import ParsedProgram

PRECISIONS = re.compile(
    r"autocast|\bamp\b|\bapex\b|float16|bf16|fp16|\bhalf\b|tf32|float32_matmul_precision|GradScaler|mixed_precision"
    r"|dtype=.auto|load_in_[48]bit|bitsandbytes|quantiz|fp8|float8|accelerat|deepspeed|fabric|create_graph|gradient_penalty|float64|\.double\(",
    re.IGNORECASE,
)
"""Words of programs that choose a precision, leave it to a library, or need second derivatives or more digits."""


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Large networks that a training loop on a GPU calls, in a program that says nothing about precision."""
    if PRECISIONS.search(program.text):
        return
    for loop in training_loops(program):
        if not any(moves_to_gpu(program, node) for node in inside(program, loop)):
            continue
        for made in called_modules(program, loop):
            if is_large(program, made) and not is_in_test(program, made):
                yield Hit(node=made, seen="a large network is trained on a GPU without autocast, TF32 or float16")


def _train(made: str, rest: str = "", gpu: str = "x.cuda()") -> str:
    return (
        f"import torchvision\nimport transformers\n\n{made}\n{rest}for x, y in loader:\n"
        f"    loss = loss_of(net({gpu}), y.cuda())\n    loss.backward()\n    opt.step()\n"
    )


RESNET = "net = torchvision.models.resnet50().cuda()"
BERT = "net = transformers.BertModel.from_pretrained('bert-base-cased').cuda()"
ENCODER = "class Net(nn.Module):\n    def __init__(self):\n        self.a = nn.TransformerEncoderLayer(512, 8)\n\n"

RULE = Rule(
    id="gpu-precision",
    summary="A large network is trained on a GPU in plain float32",
    why="Tensor cores multiply bfloat16 and float16 several times faster than float32, and activations take half of "
    "the memory. Matrix products in float32 do not even use TF32 unless torch is told so. The rule speaks only of "
    "networks whose size is visible: of torchvision, timm and transformers, or of many convolutions, transformer "
    "layers or wide linear ones.",
    fix="Run forward and loss under `with torch.autocast('cuda', dtype=torch.bfloat16):`, or at least call "
    "torch.set_float32_matmul_precision('high'); from outside: `cpulaunch --precision bf16` or `--precision "
    "tf32`.",
    find=find,
    wrong=(
        _train(RESNET + "  # <-"),
        _train(BERT + "  # <-"),
        ENCODER + _train("net = Net().to('cuda')  # <-"),
        _train("base = torchvision.models.vit_b_16()  # <-\nnet = nn.parallel.DistributedDataParallel(base.cuda())"),
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        + _train("net = torchvision.models.vgg16().to(device)  # <-", gpu="x.to(device)"),
        _train("net = torchvision.models.get_model('resnet50').cuda()  # <-"),
        "class Wide(nn.Module):\n    def __init__(self):\n        self.a = nn.Linear(4096, 4096)\n\n"
        + _train("net = Wide().cuda()  # <-"),
    ),
    right=(
        _train(RESNET, "torch.set_float32_matmul_precision('high')\n"),
        _train(RESNET, "torch.backends.cuda.matmul.allow_tf32 = True\n"),
        _train(RESNET).replace("    loss = ", "    with torch.autocast('cuda'):\n        loss = "),
        _train(RESNET).replace(".cuda()", ""),
        _train("net = nn.Linear(10, 10).cuda()"),
        ENCODER.replace("512", "128") + _train("net = Net().cuda()"),
        ENCODER.replace("512", "width").replace("(self)", "(self, width=64)") + _train("net = Net().cuda()"),
        "class Net(nn.Module):\n    def __init__(self):\n        self.a = nn.Linear(784, 128)\n\n"
        + _train("net = Net().cuda()"),
        _train("net = build_model(args).cuda()"),
        _train(RESNET, "from apex import amp as mixed\n"),
        _train(RESNET, "net, opt = accelerator.prepare(net, opt)\n"),
        _train(RESNET.replace("torchvision", "mine")),
        _train(RESNET).replace("    loss.backward()\n", ""),
        _train(BERT + "\nnet = net.bfloat16()"),
        _train(BERT.replace("cased'", "cased', torch_dtype='auto'")),
        _train(BERT.replace("cased'", "cased', load_in_8bit=True")),
        _train("net = build()\nprepare = torchvision.models.ResNet50_Weights.DEFAULT.transforms()").replace(
            "x.cuda()", "prepare(x).cuda()"
        ),
    ),
)
