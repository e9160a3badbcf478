"""One self-contained page from the JSON of a run: facts in, text out."""
