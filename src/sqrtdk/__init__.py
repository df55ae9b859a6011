"""sqrtdk: attention with the right scale; see README.md."""
