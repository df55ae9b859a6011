"""Runs small models in an environment with an older transformers, and writes what their attentions were given.

    python old_side.py SPEC WEIGHTS OUT

SPEC is a JSON file, {name: {"config": class, "model": class, "fields": {...}, "attn": ...}}; WEIGHTS has
NAME.safetensors with the weights and the tokens; OUT gets NAME.safetensors, a trace file with q, k, v and output of
each attention (docs/en/trace-file.md), and logits-NAME.safetensors.

Needs numpy, safetensors, torch and transformers, nothing of sqrtdk: it stands for a user's script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def catch(calls: list[dict[str, Any]]) -> Any:
    """Put a recorder around torch's SDPA and a function that puts one around an eager attention of transformers."""
    import torch

    plain = torch.nn.functional.scaled_dot_product_attention

    def note(query: Any, key: Any, value: Any, output: Any) -> None:
        calls.append({"q": query, "k": key, "v": value, "output": output})

    def sdpa(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(query, key, value, *args, **kwargs)
        note(query, key, value, output)
        return output

    torch.nn.functional.scaled_dot_product_attention = sdpa

    def around(eager: Any) -> Any:
        def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            output, weights = eager(module, query, key, value, *args, **kwargs)
            note(query, key, value, output.transpose(1, 2))  # transformers gives (B, L, H, E)
            return output, weights

        return attend

    return around


def write(path: Path, calls: list[dict[str, Any]], sites: list[str], given: dict[str, Any]) -> None:
    """Write a trace file."""
    import numpy as np
    from safetensors.numpy import save_file

    tensors = {
        f"calls.{number}.{name}": np.ascontiguousarray(tensor.detach().numpy())
        for number, call in enumerate(calls)
        for name, tensor in call.items()
    }
    tensors |= {f"inputs.{name}": np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in given.items()}
    document = {"schema_version": 1, "calls": [{"site": site, "layout": "BHLE"} for site in sites]}
    save_file(tensors, path, metadata={"sqrtdk_trace": json.dumps(document)})


def main(spec: Path, weights: Path, out: Path) -> None:
    """Run every model of the spec."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    calls: list[dict[str, Any]] = []
    around = catch(calls)
    for name, side in json.loads(spec.read_text(encoding="utf-8")).items():
        config = getattr(transformers, side["config"])(**side["fields"])
        cls = getattr(transformers, side["model"])
        module = sys.modules[cls.__module__]
        if hasattr(module, "eager_attention_forward") and not hasattr(module, "is_recorded"):
            module.eager_attention_forward, module.is_recorded = around(module.eager_attention_forward), True
        model = cls._from_config(config, attn_implementation=side["attn"]).eval()
        tensors = load_file(weights / f"{side['weights']}.safetensors")
        tokens = tensors.pop("tokens")
        result = model.load_state_dict(tensors, strict=False)
        lost = [key for key in result.missing_keys if not key.startswith("lm_head")]
        if lost or result.unexpected_keys:
            raise ValueError(f"{name}: missing {lost}, unexpected {result.unexpected_keys}")
        model.tie_weights()
        calls.clear()
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        sites = [site for site, part in model.named_modules() if type(part).__name__.endswith("Attention")]
        write(out / f"{name}.safetensors", calls, sites, {"input_ids": tokens})
        save_file({"logits": logits.contiguous()}, out / f"logits-{name}.safetensors")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
