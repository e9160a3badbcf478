"""Jobs of ranks on one host."""
