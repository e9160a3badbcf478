"""What a scheduler's variables say about this process: it is one host of a job, or one rank. Pure, like planning."""
