"""Short measurements of what a machine can do with this torch, run in a process of their own."""
