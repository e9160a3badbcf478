"""The program that runs torch's elastic agent on each host."""
