"""The GPU of each rank, and the cores and memory next to it."""
