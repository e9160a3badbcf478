"""Carrying a plan out: binding, starting, supervising and reporting, with all the effects that takes."""
