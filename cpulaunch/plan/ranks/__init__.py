"""Jobs of ranks, as torchrun starts them: their number, placement, variables and rendezvous."""
