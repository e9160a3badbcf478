"""What a program gives as its results: read from a file, and compared within an error."""
