"""Measuring what a machine can do with a build of torch, in child processes, and remembering it."""
