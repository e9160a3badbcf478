"""Batches of samples of random lengths, each padded to its longest."""

from collections.abc import Iterator

from cpulaunch.check.findings import Hit, Rule
from cpulaunch.check.source.datasets import loaders, pads_batches
from cpulaunch.check.source.flow import is_in_test, iterated, training_loops
from cpulaunch.check.source.program import ParsedProgram, argument, is_constant, is_open

SAMPLERS = (
    *("torch.utils.data.RandomSampler", "torch.utils.data.DistributedSampler"),
    *("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.sampler.RandomSampler"),
)


def find(program: ParsedProgram) -> Iterator[Hit]:
    """DataLoaders of a training loop that shuffle, and whose collate_fn pads each batch to its longest sample."""
    used = [program.value(each) for loop in training_loops(program) for each in iterated(program, loop)]
    for call in loaders(program):
        if call not in used or is_open(call) or is_in_test(program, call) or argument(call, "batch_sampler", 4):
            continue
        sampler = program.value(argument(call, "sampler", 3))
        is_random = is_constant(argument(call, "shuffle", 2), True) or program.called(sampler) in SAMPLERS
        if is_random and pads_batches(program, call) and not is_constant(argument(call, "batch_size", 1), 1):
            yield Hit(node=call, seen="random batches are padded to their longest sample")


COLLATE = """from torch.nn.utils.rnn import pad_sequence

def collate(batch):
    return pad_sequence(batch, batch_first=True)

"""
LOOP = "\nfor x in loader:\n    net(x).sum().backward()\n    opt.step()\n"

RULE = Rule(
    id="random-lengths",
    summary="Random batches of sequences are padded to their longest sample",
    why="In a random batch the longest sample decides the length of all: the more the lengths differ, the more of the "
    "computation is padding. Between ranks, the one with the longest batch keeps the others waiting in every step.",
    fix="Give a batch_sampler that groups samples of similar length and shuffles the groups (transformers: "
    "group_by_length=True); in distributed training, one that gives all ranks similar lengths.",
    find=find,
    wrong=(
        COLLATE + "loader = DataLoader(data, 32, shuffle=True, collate_fn=collate)  # <-" + LOOP,
        COLLATE + "loader = DataLoader(data, 32, True, num_workers=2, collate_fn=collate)  # <-" + LOOP,
        COLLATE
        + "sampler = torch.utils.data.DistributedSampler(data)\n"
        + "loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)  # <-"
        + LOOP,
        "loader = DataLoader(data, 32, shuffle=True, collate_fn=lambda x: nn.utils.rnn.pad_sequence(x))  # <-" + LOOP,
        "from torch.nn.utils import rnn\n\nclass Collate:\n    def __call__(self, batch):\n"
        "        return rnn.pad_sequence(batch)\n\n"
        "loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=Collate())  # <-" + LOOP,
    ),
    right=(
        COLLATE + "loader = DataLoader(data, 32, collate_fn=collate)" + LOOP,
        COLLATE + "loader = DataLoader(data, batch_sampler=by_length, collate_fn=collate)" + LOOP,
        COLLATE + "loader = DataLoader(data, 1, shuffle=True, collate_fn=collate)" + LOOP,
        COLLATE + "loader = DataLoader(data, 32, shuffle=shuffle, collate_fn=collate)" + LOOP,
        COLLATE + "loader = DataLoader(data, 32, shuffle=True)" + LOOP,
        COLLATE + "loader = DataLoader(data, 32, shuffle=True, collate_fn=collate)\n",
        COLLATE + "loader = DataLoader(data, 32, sampler=ByLength(data), collate_fn=collate)" + LOOP,
        "from mine import collate\nloader = DataLoader(data, 32, shuffle=True, collate_fn=collate)" + LOOP,
        "def collate(batch):\n    return torch.stack(batch)\n\n"
        "loader = DataLoader(data, 32, shuffle=True, collate_fn=collate)" + LOOP,
        COLLATE + "loader = DataLoader(data, 32, shuffle=True, collate_fn=collate, **options)" + LOOP,
        COLLATE + "for x in DataLoader(data, 32, shuffle=True, collate_fn=collate):\n    net(x)\n",
        "from mine import pad_sequence\nloader = DataLoader(data, 32, shuffle=True, collate_fn=lambda x: "
        "pad_sequence(x))" + LOOP,
    ),
)
