"""From the first worker started to the last one ended: decisions, results, reports."""
