"""What a worker reports to its launch: events, settings that failed, and its state when it exits."""
