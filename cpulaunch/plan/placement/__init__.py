"""Which CPUs and which memory each worker gets."""
