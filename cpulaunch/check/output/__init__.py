"""Findings as text, JSON, SARIF and GitHub annotations: pure."""
