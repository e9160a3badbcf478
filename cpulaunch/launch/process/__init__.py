"""Starts one worker process: finds its program, binds it, executes it, and reaps it."""
