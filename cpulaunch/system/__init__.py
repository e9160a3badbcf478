"""Kernel calls, signals and the file root: each effect that several layers need, written once."""
