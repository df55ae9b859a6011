"""Lowering: finds the role of each operation by its operands: projection, product, softmax, value product."""
