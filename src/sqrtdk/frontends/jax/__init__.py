"""JAX as a front end."""
