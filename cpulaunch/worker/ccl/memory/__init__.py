"""Collectives through the memory that ranks of one host share."""
