"""The oneCCL path of the backend: between hosts, or if ranks may not share memory."""
