"""What runs, checkpoints, claims and sweeps share on disk: one lock, durable files, hashes, and results by key."""
