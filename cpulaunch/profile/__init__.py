"""Presets and user profiles, read and chosen: each becomes a layer of settings."""
