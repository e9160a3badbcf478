"""The memory path of the backend, for ranks on one host: a barrier, and pieces of tensors in shared memory."""
