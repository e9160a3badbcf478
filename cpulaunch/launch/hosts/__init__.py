"""Jobs of ranks over several hosts, carried out by torch's elastic agent."""
