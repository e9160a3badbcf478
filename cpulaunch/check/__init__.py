"""`cpulaunch check`: what slows a PyTorch program down, found in its source without running it."""
