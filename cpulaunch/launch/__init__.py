"""Runs a plan: binds, starts and supervises the workers, and reports on them; all effects of a launch are here."""
