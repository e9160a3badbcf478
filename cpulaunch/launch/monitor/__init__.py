"""Observes running workers: their event files, their memory and CPUs, and the start barrier."""
