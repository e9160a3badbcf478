"""The commands: each wires probe, plan and launch together and prints."""
