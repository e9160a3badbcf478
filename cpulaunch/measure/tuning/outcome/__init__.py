"""What a search found: as data, in words, as a profile, and what earlier searches on this machine found."""
