"""What a launch observes while workers run: their events, memory, and the start barrier."""
