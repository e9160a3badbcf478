"""The memory path of the backend, for ranks on one host: a shared barrier, and access to each other's memory."""
