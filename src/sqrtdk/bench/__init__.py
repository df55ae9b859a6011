"""Attention against its peers: every round runs all ways once, in turn, and ratios are taken within the round."""
