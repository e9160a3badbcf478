"""cpulaunch: run any PyTorch program at a CPU server's best, unedited, and see why."""

__version__ = "0.1.0"
