"""Implementations of one resolved attention call. None imports another; `rows` is the arithmetic of a row block."""
