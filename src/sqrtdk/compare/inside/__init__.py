"""Inside an attention: the program of each side, its segments, and the causes that make one program the other."""
