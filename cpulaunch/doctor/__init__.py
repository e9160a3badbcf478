"""Checks of a machine and its software: facts, findings, and the command that fixes each."""
