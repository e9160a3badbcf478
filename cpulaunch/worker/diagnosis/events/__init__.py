"""What the profiler saw of a thread, from its events to sums."""
