"""Parameters of one of W_Q, W_K and W_V: the rank of the linear maps that it can be.

A matrix without a bias is any map from d_model inputs to d_k outputs; the maps with a single 1 are a basis of them.
"""

import itertools


def entries(inputs: int, outputs: int) -> int:
    return sum(1 for _ in itertools.product(range(inputs), range(outputs)))


def figures() -> dict[str, tuple[float, float]]:
    found = {}
    for d_model, d_k in ((512, 64), (768, 64), (512, 512), (4096, 128)):
        for matrix, module in itertools.product(("W_Q", "W_K", "W_V"), ("torch Linear", "sqrtdk MultiHeadAttention")):
            place = f"matrix={matrix}; module={module}; d_model={d_model}; d_k={d_k}"
            count = entries(d_model, d_k)
            found[f"parameters; {place}"] = float(count), 0.0
            found[f"parameters_over_formula; {place}"] = count / (3 * d_model * d_k), 0.0
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
