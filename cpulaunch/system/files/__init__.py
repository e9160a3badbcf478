"""Every file and folder that a launch makes, renames or removes, and every file that a stranger may have written."""
