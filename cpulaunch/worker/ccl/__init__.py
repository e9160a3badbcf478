"""oneCCL as a backend of torch.distributed ("ccl"), for CPU tensors: a layer over its C API, in Python."""
