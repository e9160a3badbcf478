"""Settings that change how torch runs the program, one module per feature."""
