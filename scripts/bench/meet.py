"""The smallest distributed program: its first line is printed when two ranks have added a number with gloo."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
print(f"{number.item():g} ranks have met", flush=True)
dist.destroy_process_group()
