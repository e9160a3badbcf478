"""The threads, CPU masks and child processes of a worker."""
