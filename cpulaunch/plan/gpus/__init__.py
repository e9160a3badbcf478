"""Which GPU each rank uses, and which cores and memory are next to it."""
