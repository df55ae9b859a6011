"""Lowering: what an operation is, whatever it is called: a projection, a product, a softmax, weights that meet values."""
