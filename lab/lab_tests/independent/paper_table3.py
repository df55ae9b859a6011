"""Rows of Table 3 of "Attention Is All You Need" (Vaswani et al., 2017) that vary d_k, copied from the paper.

The parameters are counted once more: d_k is a width of W_Q and W_K in the 6 attentions of the encoder and the 12 of the
decoder, with 8 heads each. The rest of the base model's 65 million does not change.
"""

# d_k: BLEU, perplexity, millions of parameters
ROWS = {64: (25.8, 4.92, 65), 32: (25.4, 5.01, 60), 16: (25.1, 5.16, 58)}
ATTENTIONS, HEADS, D_MODEL = 6 + 2 * 6, 8, 512


def figures() -> dict[str, tuple[float, float]]:
    found = {}
    for d_k, (bleu, perplexity, millions) in ROWS.items():
        removed = ATTENTIONS * HEADS * 2 * D_MODEL * (64 - d_k)
        found |= {
            f"bleu; d_k={d_k}": (bleu, 0.0),
            f"perplexity; d_k={d_k}": (perplexity, 0.0),
            f"millions_of_parameters; d_k={d_k}": (float(millions), 0.0),
            f"millions_if_only_d_k_changes; d_k={d_k}": (65 - removed / 1e6, 0.0),
        }
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
