"""The compiled kernel: its source, its build, and its registration with torch."""
