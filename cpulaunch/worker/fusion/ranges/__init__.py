"""Which values the tensors of a graph may have: found out from bounds of its inputs, without running it."""
