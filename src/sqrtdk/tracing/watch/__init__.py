"""Watching: what runs in a model, operation by operation, as a graph of where each tensor came from."""
