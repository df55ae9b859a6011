"""What other libraries are given; each module imports its library on first use."""
