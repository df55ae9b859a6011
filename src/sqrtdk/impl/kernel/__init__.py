"""The compiled kernel: its source, how it is built, and what torch has to know of it."""
