"""What changed from one saved diagnosis to another."""
