"""Where the time of a program's steps goes: hooks, counters and a short use of the profiler, written as figures."""
