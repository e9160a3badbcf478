"""What the worker plugin is asked to do inside torch, and how ranks exchange data."""
