"""A short program with the same work in each run: sums over a list that leaves the caches, and its rate."""

import time

import cpulaunch

numbers = list(range(200_000))
begun = time.perf_counter()
for _ in range(20):
    sum(numbers)
cpulaunch.metric("sums/s", 20 / (time.perf_counter() - begun))
