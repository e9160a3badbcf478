"""What every path of the backend shares: errors, types, reductions and their codes."""
