"""What the commands and options are, as rows, and the texts for people that are made of them."""
