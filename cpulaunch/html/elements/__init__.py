"""Elements of a page: text that stays text, tables, bars and points."""
