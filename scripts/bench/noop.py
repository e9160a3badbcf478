"""The smallest program: its wall time is the launcher's."""

print("done")
