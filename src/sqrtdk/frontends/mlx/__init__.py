"""MLX functions and modules as torch modules."""
