"""Parameters of W_Q, W_K and W_V of h heads: each maps d_model inputs to the d_k outputs of every head."""

from torch import nn

D_MODEL, D_K = 512, 64


def three_matrices(outputs: int) -> int:
    projections = (nn.Linear(D_MODEL, outputs, bias=False) for _ in range(3))
    return sum(parameter.numel() for one in projections for parameter in one.parameters())


def figures() -> dict[str, tuple[float, float]]:
    found = {}
    output = D_MODEL * D_MODEL  # the projection of all heads, d_k = d_model / h
    for heads in (2, 4, 8, 16):
        kept, one_head = three_matrices(heads * D_K), three_matrices(D_K)
        divided, full_width = three_matrices(heads * (D_MODEL // heads)), three_matrices(D_MODEL)
        found |= {
            f"parameters; heads={heads}; d_k=kept": (float(kept), 0.0),
            f"parameters; heads={heads}; d_k=divided": (float(divided), 0.0),
            f"over_one_layer; heads={heads}; d_k=kept": (kept / one_head, 0.0),
            f"over_one_layer; heads={heads}; d_k=divided": (divided / full_width, 0.0),
            f"over_h_layers; heads={heads}; d_k=kept": (kept / (heads * one_head), 0.0),
            f"over_h_layers; heads={heads}; d_k=divided": (divided / (heads * full_width), 0.0),
            f"over_one_layer_with_output; heads={heads}; d_k=divided": (
                (divided + output) / (full_width + output),
                0.0,
            ),
        }
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
