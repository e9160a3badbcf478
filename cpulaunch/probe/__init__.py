"""Reading a machine: files under a Root -> Host. Nothing here runs a program."""
