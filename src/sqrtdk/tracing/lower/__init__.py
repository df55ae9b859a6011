"""Lowering: what an operation is, whatever it is called: projection, product, softmax, weights that meet values."""
