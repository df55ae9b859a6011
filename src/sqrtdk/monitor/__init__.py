"""Watching a training run: what every attention did at sampled steps. The way in is `sqrtdk.watch`."""
