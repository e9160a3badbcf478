"""Captured modules: faster code for calls of modules, used only while it is certain to give the same results."""
