"""Immutable data that every layer passes on: settings, hosts, requests, plans, and the errors a user reads."""
