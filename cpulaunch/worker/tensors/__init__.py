"""Facts about tensors that captured graphs rely on: structure, versions, aliasing, mutation, equality."""
