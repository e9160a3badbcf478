"""The oneCCL path of the backend: between hosts, or where ranks may not access each other's memory."""
