"""The environment variables of a worker, each with its origin and reason."""
