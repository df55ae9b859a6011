"""The tape: every operation that ran, as a graph of nodes, each linked to what its tensor was made from."""
