"""The smallest program: nearly all of its wall time is the cost of the launcher and the interpreter."""

print("done")
