"""What a step was, from the values before and after it: rotations, and what their tables say."""
