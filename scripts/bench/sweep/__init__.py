"""The models of scripts/bench/architectures: what they are, how they are made small, and how a capture is judged."""
