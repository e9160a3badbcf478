"""An optimization by LBFGS, whose closure adds up the distances of all pairs of points."""

import torch

points, wanted = torch.randn(14, 3, requires_grad=True), torch.rand(14, 14)
optimizer = torch.optim.LBFGS([points], lr=0.1, max_iter=5)


def closure():
    optimizer.zero_grad()
    total = torch.zeros(())
    for first in range(14):
        for second in range(first + 1, 14):
            distance = (points[first] - points[second]).square().sum().sqrt()
            total = total + (distance - wanted[first, second]) ** 2
    total.backward()
    return total


while True:
    optimizer.step(closure)
