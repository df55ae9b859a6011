"""Programs of other frameworks as torch modules: `from_jax`, `from_mlx`, `from_gguf`."""

from sqrtdk.frontends.ggml.front import from_gguf as from_gguf
from sqrtdk.frontends.jax.front import from_jax as from_jax
from sqrtdk.frontends.mlx.front import from_mlx as from_mlx
