"""Check a Hugging Face model: a directory that `save_pretrained` wrote, or an id of the hub.

python examples/check_huggingface_model.py               # a small Llama with random weights
python examples/check_huggingface_model.py DIRECTORY     # your own; an id works where the hub can be reached
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

import sqrtdk


def small_llama(folder: Path) -> Path:
    """Write a Llama of two layers, grouped heads and random weights."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else str(small_llama(Path(folder)))
        report = sqrtdk.check(model, seq_len=64)
    for judged in report.calls:
        ratio = judged.call.scale.ratio
        print(f"{judged.site}  {judged.formula}  ratio {ratio:.3f}  {judged.verdict}")
    for finding in report.findings:
        print(f"{finding.severity}: {finding.message}\n  fix: {finding.fix}")
    print(f"attention calls: {len(report.calls)}, findings: {len(report.findings)}, exit code {report.exit_code}")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
