"""What a worker reports to its launch: events, degraded settings, its end."""
