"""What happens inside a worker: the only package that imports torch."""
