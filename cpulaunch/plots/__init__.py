"""Charts as pictures in files, drawn by matplotlib, which the extra `plots` installs."""
