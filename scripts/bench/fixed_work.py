"""A short program with the same work in each run: sums over a list that leaves the caches, and its rate.

Its argument is the number of sums, each about a millisecond (default: 20).
"""

import sys
import time

import cpulaunch

count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
numbers = list(range(200_000))
begun = time.perf_counter()
for _ in range(count):
    sum(numbers)
cpulaunch.metric("sums/s", count / (time.perf_counter() - begun))
