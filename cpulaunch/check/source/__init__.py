"""A parsed program: what its names refer to, its loops, and what its comments ask for."""
