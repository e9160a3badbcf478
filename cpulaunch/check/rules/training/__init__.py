"""Rules about training loops and distributed training."""
