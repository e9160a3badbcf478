"""The commands that measure programs: what they parse and print."""
