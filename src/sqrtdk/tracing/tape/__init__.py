"""The tape: a graph of every operation that ran, in which each tensor's node links to the nodes it was made from."""
