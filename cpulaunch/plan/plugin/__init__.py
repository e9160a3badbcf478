"""The settings for the worker plugin inside torch, and the collectives of ranks."""
