"""The smallest distributed program: each rank prints one line after a first all-reduce with gloo."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
print(f"sum over ranks: {number.item():g}", flush=True)
dist.destroy_process_group()
