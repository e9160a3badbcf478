"""Workers' output: read, labelled, copied to files, searched for metrics."""
