"""Captured modules: faster code for what a module computes, used only while it is certain to compute the same."""
