"""Rules about GPUs, precision and copies between devices."""
