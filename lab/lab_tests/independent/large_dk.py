"""Median head dimension of large language and vision models, from what was published of them, not from a library.

Width and heads are those of the papers or model cards; d_k is their quotient, or stated there where it is not.
"""

import statistics

WIDTH_AND_HEADS = {
    "GPT-3 175B": (12288, 96),
    "Gopher 280B": (16384, 128),
    "Chinchilla 70B": (8192, 64),
    "OPT 175B": (12288, 96),
    "BLOOM 176B": (14336, 112),
    "Megatron-Turing 530B": (20480, 128),
    "GPT-NeoX 20B": (6144, 64),
    "GPT-J 6B": (4096, 16),
    "LLaMA 65B": (8192, 64),
    "Llama 3 405B": (16384, 128),
    "Mistral 7B": (4096, 32),
    "Qwen2 72B": (8192, 64),
    "Falcon 180B": (14848, 232),
    "Phi-3 mini": (3072, 32),
    "ViT-22B": (6144, 48),
    "OLMo 2 13B": (5120, 40),
}
STATED = {"Gemma 7B": 256, "PaLM 540B": 256, "T5 11B": 128, "DeepSeek-V3": 192, "Qwen3 235B": 128}


def figures() -> dict[str, tuple[float, float]]:
    dims = [width / heads for width, heads in WIDTH_AND_HEADS.values()] + list(STATED.values())
    return {"median; size=large": (float(statistics.median(dims)), 0.0)}


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
