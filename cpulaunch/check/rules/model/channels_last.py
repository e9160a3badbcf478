"""A convolutional network in mixed precision whose tensors stay in the contiguous layout."""

import re
from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.flow import inside, is_in_test, training_loops
from cpulaunch.check.source.models import called_modules, is_convolutional
from cpulaunch.check.source.program import ParsedProgram

LAYOUTS = re.compile(r"channels_last|memory_format|nhwc", re.IGNORECASE)
AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast")


def find(program: ParsedProgram) -> Iterator[Hit]:
    """Convolutional networks that a training loop calls under autocast, in a program that sets no layout."""
    if LAYOUTS.search(program.text):
        return
    for loop in training_loops(program):
        if not any(program.called(node) in AUTOCASTS for node in inside(program, loop)):
            continue
        for made in called_modules(program, loop):
            if is_convolutional(program, made) and not is_in_test(program, made):
                yield Hit(node=made, seen="a convolutional network is trained under autocast in the contiguous layout")


def _train(made: str, rest: str = "") -> str:
    return (
        f"import torchvision\nimport timm\n\n{made}\n{rest}for x, y in loader:\n"
        "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = loss_of(net(x), y)\n"
        "    loss.backward()\n    opt.step()\n"
    )


def _net(layers: int) -> str:
    body = "".join(f"        self.conv{n} = nn.Conv2d(64, 64, 3)\n" for n in range(layers))
    return f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n{body}\n"


RESNET = "net = torchvision.models.resnet50().cuda()"

RULE = Rule(
    id="channels-last",
    summary="A convolutional network in mixed precision stays in the contiguous layout",
    why="Kernels for two-dimensional convolutions in float16 and bfloat16 (tensor cores, oneDNN) work in the layout "
    "channels_last. For contiguous tensors they convert inputs and outputs in every layer.",
    fix="Call net = net.to(memory_format=torch.channels_last), and the same for the inputs, or run the program with "
    "`cpulaunch --channels-last`.",
    find=find,
    wrong=(
        _train(RESNET + "  # <-"),
        _train("net = timm.create_model('resnet50d', pretrained=True).to('cuda')  # <-"),
        _net(5) + _train("net = Net().cuda()  # <-"),
        _train("base = torchvision.models.mobilenet_v2()  # <-\nnet = nn.parallel.DistributedDataParallel(base)"),
        _train("base = torchvision.models.efficientnet_b0().to('cuda')  # <-\nnet = torch.compile(base)"),
        _net(4)
        + "class All(nn.Module):\n    def __init__(self):\n        self.net = Net()\n\n"
        + _train("net = All()  # <-"),
        "import torchvision\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.backbone = torchvision.models.resnet18()\n\n" + _train("net = Net()  # <-\nnet = net.cuda()"),
        _train("net = torchvision.models.vgg16()  # <-\nif many:\n    net = nn.DataParallel(net)"),
    ),
    right=(
        _train(RESNET, "net = net.to(memory_format=torch.channels_last)\n"),
        _train("net = torchvision.models.vit_b_16().cuda()"),
        _train("net = timm.create_model('vit_base_patch16_224').cuda()"),
        _train("net = timm.create_model(args.model).cuda()"),
        _net(2) + _train("net = Net().cuda()"),
        _train("net = torchvision.models.vgg16()\nif small:\n    net = Small()"),
        _train(RESNET).replace("with torch.autocast('cuda', dtype=torch.bfloat16):", "if True:"),
        _train("net = build_model().cuda()"),
        _net(5).replace("Conv2d", "Conv1d") + _train("net = Net().cuda()"),
        _train(RESNET).replace("    loss.backward()\n", ""),
        _train(RESNET.replace("torchvision.models", "mine")),
        _train(RESNET + "\nnet = prepared(net)"),
        "def test_train():\n" + "".join(f"    {line}\n" for line in _train(RESNET).splitlines()),
    ),
)
