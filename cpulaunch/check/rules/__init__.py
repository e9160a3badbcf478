"""The rules: one file each, with the examples that are its tests and its documentation."""
