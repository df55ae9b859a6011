"""What the tests of front ends share holds no tests: without JAX, MLX or gguf, it can't be imported."""

from __future__ import annotations

collect_ignore = [
    "copied.py", "gguf_models.py", "keras_programs.py", "libraries.py", "llama.py", "mlx_models.py", "mlx_ports.py",
    "mlx_qwen.py", "ports.py", "programs.py", "table.py",
]  # fmt: skip
