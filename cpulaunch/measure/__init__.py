"""What programs' launches are measured with: samples of real launches, what disturbed them, and their statistics."""
