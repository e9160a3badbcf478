"""Whose sockets of TCP are at a port of this host, and which connections this process has."""
