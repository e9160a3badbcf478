"""Deciding: a host and a request become a launch plan, without reading or writing anything."""
