"""The Triton kernel of `impl="triton"`: `forward` and `backward` do the arithmetic, `load` knows whether it can run."""
