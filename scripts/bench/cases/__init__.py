"""The programs of scripts/bench/program.py: models with random weights, and what a step of each program does."""
