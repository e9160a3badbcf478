"""Collectives by oneCCL, between hosts."""
