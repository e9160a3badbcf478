"""The collectives of the stress test: what ranks give to ccl and to gloo, and what they must get."""

import random

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceCoalescedOptions

from cpulaunch.worker.ccl.memory.library import PAYLOAD_BYTES, PIECE_BYTES, payload_bytes

Op = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCED = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
MOVED = (*REDUCED, torch.int16, torch.complex64)
OPERATIONS = {Op.SUM: torch.add, Op.PRODUCT: torch.mul, Op.MAX: torch.maximum, Op.MIN: torch.minimum, Op.AVG: torch.add}
OF_BYTES = {Op.SUM: Op.MAX, Op.MAX: Op.MAX, Op.PRODUCT: Op.MIN, Op.MIN: Op.MIN}
"""What a reduction of bools is for their bytes, which gloo reduces."""
SMALL = (0, 1, 2, 3, 7, 64, 127, 513, 1000, 8191)
LARGEST_BYTES, TABLE = 3 << 20, 4096
_tables = {}


def table(dtype, kind):
    """Numbers from which every rank cuts its inputs. Kinds: exact in every sum of 8, near 1, or any bits."""
    if (dtype, kind) not in _tables:
        count, draw = LARGEST_BYTES // dtype.itemsize + TABLE, torch.Generator().manual_seed(0)
        if kind == "bits" and dtype != torch.bool:
            made = torch.randint(0, 256, (count * dtype.itemsize,), generator=draw, dtype=torch.uint8).view(dtype)
        elif kind == "near 1" and dtype.is_floating_point:
            made = (torch.rand(count, generator=draw, dtype=torch.float64) + 0.5).to(dtype)
        else:
            made = torch.randint(0, 2 if dtype == torch.bool else 5, (count,), generator=draw).to(dtype)
        _tables[dtype, kind] = made
    return _tables[dtype, kind]


def sizes(draw, dtype, size):
    """A number of elements, often near a limit of the library."""
    limits = (payload_bytes(size), PAYLOAD_BYTES // size, payload_bytes(size) // size, PIECE_BYTES, 512 * size)
    count = draw.choice(limits) // dtype.itemsize + draw.choice((-1, 0, 0, 1, 5))
    most = LARGEST_BYTES // dtype.itemsize // size
    return min(draw.choice((*SMALL, count, count, count, draw.choice((40_000, 300_000, 2 * count)))), most)


class Call:
    """A collective, drawn alike by all ranks of the group; `plain` runs are those of gloo."""

    def __init__(self, number, seed, members):
        draw = self.draw = random.Random(f"{seed} {number}")
        self.members, self.number, self.size = members, number, len(members)
        self.me = members.index(dist.get_rank())
        self.kind = draw.choice(KINDS)
        self.reduces = "reduce" in self.kind
        self.dtype = draw.choice(REDUCED if self.reduces else MOVED)
        self.operation = draw.choice(list(OPERATIONS)[: 4 if self.dtype == torch.bool else 5])
        self.values = draw.choice(("exact", "near 1")) if self.reduces else "bits"
        if self.reduces and self.operation == Op.PRODUCT:
            self.values = "near 1"
        self.count, self.root = sizes(draw, self.dtype, self.size), draw.randrange(self.size)
        self.row, self.shift = draw.choice((None, self.me, draw.randrange(self.size))), draw.choice((0, 0, 1))
        most = max(1, self.count // self.size)
        self.splits = [[draw.choice((0, 1, most // 2, most)) for _ in members] for _ in members]
        self.is_even = self.kind != "all_to_all" and draw.random() < 0.8
        self.is_async, self.calls_back = draw.random() < 0.6, draw.random() < 0.2
        self.layouts = [draw.choice(("plain", "plain", "step", "offset", "turned")) for _ in range(3)]

    def of(self, rank, count=None):
        """A member's input, also one that this rank does not have."""
        start = (self.members[rank] * 7919 + self.number * 104_729) % TABLE
        return table(self.dtype, self.values)[start : start + (self.count if count is None else count)].clone()

    def mine(self, count=None):
        return self.of(self.me, count)

    def placed(self, values, plain, layout=0):
        """A tensor of these values, with strides or an address that programs have too."""
        layout, count = "plain" if plain else self.layouts[layout], values.numel()
        if layout == "step":
            return torch.zeros(2 * count, dtype=self.dtype)[::2].copy_(values)
        if layout == "offset":
            return torch.zeros(count + 3, dtype=self.dtype)[3:].copy_(values)
        if layout == "turned" and count % 2 == 0 and count:
            return values.view(2, -1).t().contiguous().t()
        return values

    def room(self, count, plain, layout=1):
        return self.placed(torch.full((count,), 1, dtype=self.dtype), plain, layout)

    def run(self, group, *, plain, is_async):
        """The work, or None, and the tensors that have the result."""
        return getattr(self, self.kind)(group, plain, is_async)

    def gloo_reduces(self, function, tensor, *arguments):
        """Effect: gloo reduces the tensor."""
        if self.dtype == torch.bool:
            function(bytes_of(tensor), *arguments[:-1], OF_BYTES[self.operation], arguments[-1])
            return
        function(tensor, *arguments[:-1], Op.SUM if self.operation == Op.AVG else self.operation, arguments[-1])
        self.average(tensor)

    def average(self, tensor):
        if self.operation == Op.AVG:
            tensor.copy_(
                tensor.long().div(self.size, rounding_mode="trunc")
                if not tensor.is_floating_point()
                else tensor / self.size
            )

    def all_reduce(self, group, plain, is_async):
        tensor = self.placed(self.mine(), plain)
        if plain:
            return self.gloo_reduces(dist.all_reduce, tensor, group), [tensor]
        return dist.all_reduce(tensor, self.operation, group, async_op=is_async), [tensor]

    def all_reduce_coalesced(self, group, plain, is_async):
        tensors = [self.placed(self.mine(self.count // part), plain, part - 1) for part in (1, 2, 3)]
        if plain:
            for tensor in tensors:
                self.gloo_reduces(dist.all_reduce, tensor, group)
            return None, tensors
        options = AllreduceCoalescedOptions()
        options.reduceOp = self.operation
        return group.allreduce_coalesced(tensors, options), tensors

    def reduce(self, group, plain, is_async):
        tensor, root = self.placed(self.mine(), plain), self.members[self.root]
        results = [tensor] if self.me == self.root else []
        if plain:
            return self.gloo_reduces(dist.reduce, tensor, root, group), results
        return dist.reduce(tensor, root, self.operation, group, async_op=is_async), results

    def reduce_scatter(self, group, plain, is_async):
        whole = self.mine(self.size * self.count)
        if plain:
            return self.gloo_reduces(dist.all_reduce, whole, group), [self.rows(whole)[self.me]]
        part = self.part(whole)
        if part is None:
            part, whole = self.room(self.count, plain), self.placed(whole, plain, 2)
        return dist.reduce_scatter_tensor(part, whole, self.operation, group, async_op=is_async), [part]

    def reduce_scatter_list(self, group, plain, is_async):
        if plain:
            return self.reduce_scatter(group, plain, is_async)
        rows = [self.placed(row.clone(), plain, 2) for row in self.rows(self.mine(self.size * self.count))]
        part = self.room(self.count, plain)
        return dist.reduce_scatter(part, rows, self.operation, group, async_op=is_async), [part]

    def rows(self, whole):
        return [whole[rank * self.count : (rank + 1) * self.count] for rank in range(self.size)]

    def part(self, whole):
        """A tensor of `count` elements in the whole, in the place of a rank or beside it; None: apart from it."""
        start = 0 if self.row is None else self.row * self.count + self.shift
        fits = self.row is not None and start + self.count <= whole.numel()
        return whole[start : start + self.count] if fits else None

    def broadcast(self, group, plain, is_async):
        tensor = self.placed(self.mine(), plain)
        moved = bytes_of(tensor) if plain else tensor
        return dist.broadcast(moved, self.members[self.root], group, async_op=is_async), [tensor]

    def all_gather(self, group, plain, is_async):
        whole, mine = torch.zeros(self.size * self.count, dtype=self.dtype), self.mine()
        if plain:
            return dist.all_gather_into_tensor(bytes_of(whole), bytes_of(mine), group), [whole]
        if (part := self.part(whole)) is not None:
            mine = part.copy_(mine)
        else:
            whole, mine = self.room(whole.numel(), plain), self.placed(mine, plain, 2)
        return dist.all_gather_into_tensor(whole, mine, group, async_op=is_async), [whole]

    def counts(self):
        return [self.count if self.is_even else (self.count + rank) // 2 for rank in range(self.size)]

    def all_gather_list(self, group, plain, is_async):
        counts = self.counts()
        if plain and not self.is_even:
            return None, self.known()
        mine = self.placed(self.mine(counts[self.me]), plain)
        rows = [self.room(count, plain, rank % 3) for rank, count in enumerate(counts)]
        if plain:
            return dist.all_gather([bytes_of(row) for row in rows], bytes_of(mine), group), rows
        return dist.all_gather(rows, mine, group, async_op=is_async), rows

    def all_to_all(self, group, plain, is_async):
        sent, taken = self.splits[self.me], [row[self.me] for row in self.splits]
        source, target = self.mine(sum(sent)), torch.ones(sum(taken), dtype=self.dtype)
        if plain:
            sent, taken = ([each * self.dtype.itemsize for each in counts] for counts in (sent, taken))
            return dist.all_to_all_single(bytes_of(target), bytes_of(source), taken, sent, group), [target]
        if self.row is not None:  # One buffer for both, as far as they go.
            buffer = torch.zeros(max(sum(sent), sum(taken)) + self.shift, dtype=self.dtype)
            source = buffer[: sum(sent)].copy_(source)
            target = buffer[self.shift : self.shift + sum(taken)]
        elif "step" in self.layouts:
            source = torch.zeros(2 * sum(sent), dtype=self.dtype)[::2].copy_(source)
            target = torch.zeros(2 * sum(taken), dtype=self.dtype)[::2]
        return dist.all_to_all_single(target, source, taken, sent, group, async_op=is_async), [target]

    def gather_and_scatter(self, group, plain, is_async):
        """Collects all tensors in the root, which deals them out again in another order."""
        mine, root, is_root = self.placed(self.mine(), plain), self.members[self.root], self.me == self.root
        rows = [self.room(self.count, plain, rank % 3) for rank in range(self.size)] if is_root else []
        back = self.room(self.count, plain, 2)
        seen = bytes_of if plain else lambda tensor: tensor
        dist.gather(seen(mine), [seen(row) for row in rows] or None, root, group)
        dealt = [seen(row) for row in rows[1:] + rows[:1]] or None
        return dist.scatter(seen(back), dealt, root, group, async_op=is_async), [back, *rows]

    def barrier(self, group, plain, is_async):
        return dist.barrier(group, async_op=is_async), []

    def reduced(self, count):
        total = self.of(0, count)
        for rank in range(1, self.size):
            other = self.of(rank, count)
            total = OPERATIONS[self.operation](total, other) if self.dtype != torch.bool else self.both(total, other)
        self.average(total)
        return total

    def both(self, one, other):
        return one | other if OF_BYTES[self.operation] == Op.MAX else one & other

    def known(self):
        """The results, from the inputs of all members."""
        if self.kind.startswith("reduce_scatter"):
            return [self.rows(self.reduced(self.size * self.count))[self.me]]
        if self.kind == "all_reduce_coalesced":
            return [self.reduced(self.count // part) for part in (1, 2, 3)]
        if self.reduces:
            return [self.reduced(self.count)] if self.kind != "reduce" or self.me == self.root else []
        if self.kind == "all_to_all":
            parts = [self.of(rank, sum(row)).split(row)[self.me] for rank, row in enumerate(self.splits)]
            return [torch.cat(parts)]
        rows = [self.of(rank, count) for rank, count in enumerate(self.counts())]
        if self.kind == "gather_and_scatter":
            rows = [self.of(rank) for rank in range(self.size)]
            return [rows[(self.me + 1) % self.size], *(rows if self.me == self.root else [])]
        if self.kind == "all_gather":
            return [torch.cat([self.of(rank) for rank in range(self.size)])]
        return {"broadcast": [self.of(self.root)], "all_gather_list": rows, "barrier": []}[self.kind]

    def check(self, results, expected):
        """Raises: AssertionError if a result is not as expected."""
        assert len(results) == len(expected)
        is_exact = self.values == "exact" or not self.dtype.is_floating_point or self.size == 2
        is_exact = is_exact or self.operation in (Op.MAX, Op.MIN) or not self.reduces
        for result, wanted in zip(results, expected, strict=True):
            result = torch.empty_like(wanted).copy_(result.reshape(wanted.shape))
            if is_exact:
                right = torch.equal(bytes_of(result), bytes_of(wanted))
            else:
                bound = 2 * self.size * torch.finfo(self.dtype).eps * wanted.double().abs()
                right = bool(((result.double() - wanted.double()).abs() <= bound).all())
            assert right, f"wrong result in call {self.number}: {self}"

    def __repr__(self):
        shown = ("kind", "dtype", "operation", "values", "count", "members", "root", "row", "shift", "layouts")
        return f"{ {name: getattr(self, name) for name in shown} }"


KINDS = (
    *("all_reduce", "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_list"),
    *("broadcast", "all_gather", "all_gather_list", "all_to_all", "gather_and_scatter", "barrier"),
)


def bytes_of(tensor):
    return tensor.view(torch.uint8)
