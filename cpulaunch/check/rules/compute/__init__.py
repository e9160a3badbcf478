"""Rules about modules, tensors and threads."""
