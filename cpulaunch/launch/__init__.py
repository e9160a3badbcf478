"""Carrying a plan out: binding, spawning, supervising. The effects live here."""
