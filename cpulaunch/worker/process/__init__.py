"""The worker's threads, CPU masks and child processes."""
