"""From the figures of a program's steps to its bottlenecks, in words."""
