"""Reads the workers' output, labels its lines, copies it to the terminal and to files, and searches it for metrics."""
