"""Installed software, found without running it: allocators, OpenMP runtimes, torch, oneCCL."""
