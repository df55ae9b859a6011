"""What the laws cost: `check` with and without them, on small models and on one of over two billion parameters.

The two ways take turns in one run, so that drift of the machine hits both alike. Bars: three times the time without
them on a small model; on the large one the time of two plain forward passes. Ratios are medians with the spread between
the 10th and the 90th percentile of the pairs. Exits 1 if a bar is missed.

`--gradient` times the law `gradient` instead: in plain training steps (forward and backward) where it is named, with a
bar of three of a model of the size of GPT-2 small, and what it adds to a check of all laws over what the others add.

    python benchmarks/laws.py [--repeats 5] [--large] [--gradient] [--json FILE]
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
from sqrtdk.laws import ask
from sqrtdk.laws.table import names_of
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
GPT2 = {"vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_positions": 2048}  # GPT-2 small
SMALL_GPT2 = {"vocab_size": 512, "n_embd": 128, "n_head": 4, "n_layer": 4}
TRAINED: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # the model, samples, tokens
    "llama, 128 wide": (MODELS["llama"], 2, 100),
    "gpt2, 128 wide": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**SMALL_GPT2)), 2, 100),
    "gpt2 small": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, n_layer=12)), 2, 129),
    "gpt2 small, 2048 tokens": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, n_layer=12)), 1, 2048),
}
BAR, LARGE_BAR, STEPS_BAR = 3.0, 2.0, 3.0


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


def in_steps(name: str, repeats: int) -> Spread:
    """What the law `gradient` adds to a run of a model, in plain training steps on the same inputs."""
    make, samples, tokens = TRAINED[name]
    torch.manual_seed(0)
    model = make()
    ids = torch.randint(3, 500, (samples, tokens))

    def step() -> None:
        model.train()
        model(ids).logits.float().logsumexp(-1).mean().backward()
        model.zero_grad(set_to_none=True)

    asked = {laws: lambda laws=laws: ask(model, {"input_ids": ids}, laws) for laws in ("none", "gradient")}
    times = rounds({"step": step, **asked}, repeats, clock=time.process_time)
    added = [one - other for one, other in zip(times["gradient"], times["none"], strict=True)]
    return ratio(added, times["step"])


def over_others(name: str, repeats: int) -> Spread:
    """What the law `gradient` adds to a check of all laws, over what the other laws add."""
    torch.manual_seed(0)
    model = TRAINED[name][0]().eval()
    others = [law for law in names_of("all") if law != "gradient"]
    ways = {"none": "none", "others": others, "all": "all"}
    asked = {way: lambda laws=laws: sqrtdk.check(model, laws=laws) for way, laws in ways.items()}
    times = rounds(asked, repeats, clock=time.process_time)
    added = [one - other for one, other in zip(times["all"], times["others"], strict=True)]
    return ratio(added, [one - other for one, other in zip(times["others"], times["none"], strict=True)])


def of_gradient(repeats: int) -> tuple[dict[str, Spread], list[str]]:
    """The figures of the law `gradient`, and those of the models that miss a bar."""
    figures: dict[str, Spread] = {}
    for name in TRAINED:
        figures[name] = spread = in_steps(name, 1 if "2048" in name else repeats)
        print(f"{name:24} gradient: {spread.text(2)} training steps", flush=True)
    for name in [name for name in TRAINED if "2048" not in name]:
        figures[f"{name}, over others"] = spread = over_others(name, repeats)
        print(f"{name:24} gradient adds to a check {spread.text(2)} of what the other laws add", flush=True)
    missed = ["gpt2 small"] if figures["gpt2 small"].median > STEPS_BAR else []
    return figures, missed + [name for name, spread in figures.items() if "over" in name and spread.median > 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="also the large model: 10 GB of memory, minutes")
    parser.add_argument("--gradient", action="store_true", help="the law `gradient` instead, minutes")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    if options.gradient:
        figures, missed = of_gradient(options.repeats)
    else:
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
        here |= {
            "torch": torch.__version__,
            "transformers": hf.__version__,
            "bars": {"small": BAR, "large": LARGE_BAR, "steps": STEPS_BAR},
        }
        record = here | {name: asdict(spread) for name, spread in figures.items()}
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2) + "\n")
    print("missed: " + ", ".join(missed) if missed else "every bar is met")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
