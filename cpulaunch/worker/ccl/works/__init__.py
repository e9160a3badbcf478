"""The works of a group: their order, the threads that run them, and what programs wait for."""
