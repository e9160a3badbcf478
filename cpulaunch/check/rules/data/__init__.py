"""Rules about data sets and their loaders."""
