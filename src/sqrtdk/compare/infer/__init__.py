"""What a side does not tell: its formula, its paths and its masks, found from its numbers and the other side's."""
