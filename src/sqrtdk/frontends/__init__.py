"""Programs of other frameworks as torch modules: `from_jax`, `from_mlx`, `from_gguf`. Each is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqrtdk._extras import lazy_names

if TYPE_CHECKING:
    from sqrtdk.frontends.ggml.front import from_gguf as from_gguf
    from sqrtdk.frontends.jax.front import from_jax as from_jax
    from sqrtdk.frontends.mlx.front import from_mlx as from_mlx

_HOME = {
    "from_gguf": "sqrtdk.frontends.ggml.front",
    "from_jax": "sqrtdk.frontends.jax.front",
    "from_mlx": "sqrtdk.frontends.mlx.front",
}
__all__ = [*_HOME]
__getattr__, __dir__ = lazy_names(__name__, _HOME)
