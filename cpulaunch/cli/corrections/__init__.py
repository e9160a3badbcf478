"""What a command line probably means that is not understood as it is typed; other launches import nothing of this."""
