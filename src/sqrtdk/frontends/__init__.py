"""Programs of other frameworks as torch modules: `from_jax(function, parameters, *inputs)`."""

from sqrtdk.frontends.jax.front import from_jax as from_jax
