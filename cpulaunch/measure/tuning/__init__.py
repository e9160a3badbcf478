"""The search for a program's best settings on this machine."""
