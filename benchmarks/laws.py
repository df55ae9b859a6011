"""What the laws cost: `check` with and without them, on small models and on one of over two billion parameters.

The two ways take turns in one run, so that drift of the machine hits both alike. Bars: three times the time without
them on a small model; on the large one the time of two plain forward passes. Ratios are medians with the spread between
the 10th and the 90th percentile of the pairs. Exits 1 if a bar is missed.

    python benchmarks/laws.py [--repeats 5] [--large] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf
from torch import nn

import sqrtdk
from sqrtdk._environment import cpu_name
from timing import Spread, ratio, rounds

SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **HEADS)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**SMALL, **HEADS)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=512, d_model=128, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "vit": lambda: hf.ViTModel(
        hf.ViTConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=4, **HEADS, image_size=64, patch_size=8)
    ),
}
BAR, LARGE_BAR = 3.0, 2.0


def large() -> nn.Module:
    """Of 2.2 billion parameters, in bfloat16."""
    config = hf.LlamaConfig(
        vocab_size=32000, hidden_size=3072, intermediate_size=8192, num_hidden_layers=18, num_attention_heads=24
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return hf.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def small(repeats: int) -> dict[str, Spread]:
    """For each small model the time of `check` with laws over that without."""
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().eval()
        ways = {laws: lambda laws=laws, model=model: sqrtdk.check(model, laws=laws) for laws in ("none", "all")}
        times = rounds(ways, repeats)
        found[name] = ratio(times["all"], times["none"])
    return found


def of_large(repeats: int) -> Spread:
    """The time that laws add to `check`, in plain forward passes."""
    torch.manual_seed(0)
    model = large().eval()
    ids = torch.randint(3, 32000, (1, 32))
    plain, added = [], []
    with torch.no_grad():
        model(ids)
    for _ in range(repeats):
        begin = time.perf_counter()
        with torch.no_grad():
            model(ids)
        plain.append(time.perf_counter() - begin)
        seconds = {}
        for laws in ("none", "all"):
            begin = time.perf_counter()
            sqrtdk.check(model, {"input_ids": ids}, laws=laws)
            seconds[laws] = time.perf_counter() - begin
        added.append(seconds["all"] - seconds["none"])
    return ratio(added, plain)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="also the large model: 10 GB of memory, minutes")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    figures = small(options.repeats)
    for name, spread in figures.items():
        print(f"{name:8} check with laws over check without: {spread.text(2)}")
    missed = [name for name, spread in figures.items() if spread.median > BAR]
    if options.large:
        figures["large"] = spread = of_large(min(options.repeats, 3))
        print(f"{'large':8} laws add {spread.text(2)} forward passes")
        missed += ["large"] if spread.median > LARGE_BAR else []
    if options.json:
        here = {"date": date.today().isoformat(), "machine": cpu_name(), "python": platform.python_version()}
        here |= {"torch": torch.__version__, "transformers": hf.__version__, "bars": {"small": BAR, "large": LARGE_BAR}}
        record = here | {name: asdict(spread) for name, spread in figures.items()}
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2) + "\n")
    print("missed: " + ", ".join(missed) if missed else "every bar is met")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
