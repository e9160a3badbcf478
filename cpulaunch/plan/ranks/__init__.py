"""Jobs of ranks, as torchrun starts them: their number, CPUs, variables and rendezvous."""
