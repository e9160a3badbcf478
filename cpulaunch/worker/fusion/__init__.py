"""Graphs for oneDNN Graph: as text, without operations it cannot compile, tried in another process first."""
