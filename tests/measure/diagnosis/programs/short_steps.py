"""Many short steps of a few operations, as of a policy in a simulation."""

import torch
from torch import nn

torch.set_num_threads(1)
policy = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]).eval()
state = torch.zeros(1, 8)
with torch.inference_mode():
    for _ in range(10**8):
        state = policy(state) * 0.9
