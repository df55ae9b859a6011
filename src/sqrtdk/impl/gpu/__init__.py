"""The Triton kernel of `impl="triton"`: see `forward` and `backward` for the arithmetic, `load` for whether it is there."""
