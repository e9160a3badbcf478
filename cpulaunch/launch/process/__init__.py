"""One worker process, from finding its program to reaping it."""
