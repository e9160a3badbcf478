"""Errors, element types, reductions and packed calls, shared by both paths of the backend."""
