"""One self-contained page from the JSON of a run, a comparison or a search: facts in, text out."""
