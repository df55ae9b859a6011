"""What scale the model families of transformers apply: the record behind the table of docs/en/port.md.

Each family is audited twice, from its default config cut to a few layers of every kind, without any download:

- as it is, in full width on the meta device (`sqrtdk.check(static=True)`): head dimension, scale, what declares it,
  softcap, norms and positions, as a port of that config has to have them;
- shrunk, with random weights (`sqrtdk.check`): the model runs, and the slope of its logits against `q . k` is the
  scale of the formula, or the family is not in the table.

    python benchmarks/families.py [--output benchmarks/results/families.json] [TYPE ...]

With types, these alone are measured anew, and the rest of the record stays. `python scripts/port_table.py` writes the
table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

import sqrtdk
from sqrtdk._machine import cpu_name
from sqrtdk.audit.declared import KNOWN_FIELDS
from sqrtdk.audit.families import MLA_YARN
from sqrtdk.audit.records import CheckReport, JudgedCall
from sqrtdk.audit.rope_lengths import ROPE_FIELDS
from transformers_small import NotBuiltError, build, default_config, model_classes, small_config

RESULTS = Path(__file__).parent / "results" / "families.json"
TYPES = (
    "gpt2", "gptj", "gpt_neo", "gpt_neox", "gpt_bigcode", "gpt_oss", "openai-gpt", "codegen", "ctrl", "opt",
    "bloom", "falcon", "mpt", "biogpt", "xglm", "llama", "llama4_text", "mistral", "ministral3", "mistral4",
    "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "vaultgemma", "phi", "phi3", "phimoe", "cohere", "cohere2", "olmo", "olmo2",
    "olmo3", "olmoe", "flex_olmo", "granite", "granitemoe", "stablelm", "starcoder2", "persimmon", "nemotron_h",
    "deepseek_v3", "deepseek_v32", "glm", "glm4", "glm4_moe", "ernie4_5", "exaone4", "smollm3", "apertus", "arcee",
    "bitnet", "helium", "lfm2", "minicpm3", "minimax", "minimax_m2", "nanochat", "seed_oss", "diffllama", "afmoe",
    "solar_open", "bert", "roberta", "xlm-roberta", "electra", "albert", "distilbert", "camembert", "mpnet",
    "rembert", "megatron-bert", "mobilebert", "modernbert", "deberta", "deberta-v2", "nomic_bert", "eurobert",
    "layoutlm", "big_bird", "funnel", "t5", "mt5", "umt5", "longt5", "t5gemma", "bart", "mbart", "pegasus",
    "marian", "blenderbot", "m2m_100", "prophetnet", "whisper", "speech_to_text", "wav2vec2", "hubert", "wavlm",
    "vit", "deit", "beit", "dinov2", "dinov3_vit", "siglip_vision_model", "clip", "cvt", "vit_mae", "ernie4_5_moe",
    "jais2", "cwm", "internlm3", "glm4_moe_lite", "youtu", "mimo_v2_flash",
)  # fmt: skip


# Fields of a config that another scale, a softcap or a norm of q and k may come from, whatever they are by default.
YARN_FIELD = "rope_parameters.mscale_all_dim"  # read by the families of MLA_YARN, which square it
FIELDS = (
    *(path for path in KNOWN_FIELDS if path not in ROPE_FIELDS),
    *("attn_logit_softcapping", "attention_logit_cap", "use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm"),
    *("qk_layernorms", "attn_config.qk_ln"),
)


def fields_of(config: Any) -> list[str]:
    """Those of FIELDS that a config has."""

    def has(path: str) -> bool:
        holder: Any = config.to_dict()
        for name in path.split("."):
            if not isinstance(holder, dict) or name not in holder:
                return False
            holder = holder[name]
        return True

    yarn = [YARN_FIELD] if config.model_type in MLA_YARN else []
    return [path for path in FIELDS if has(path)] + yarn


def facts_of(judged: JudgedCall) -> dict[str, Any]:
    """What of a call a port has to have."""
    call = judged.call
    return {
        "verdict": judged.verdict,
        "head_dim": call.head_dim,
        "scale": call.scale.effective,
        "ratio": call.scale.ratio,
        "declared_by": judged.declared_by,
        "attribute": judged.attribute,
        "formula": call.formula,
        "score": call.score,
        "softcap": call.softcap,
        "norm": call.norm,
        "norm_gain": call.norm_gain,
        "rope": call.rope,
        "bias": call.bias,
        "sinks": call.sinks,
        "mask": None if call.mask is None else call.mask.kind,
    }


def calls_of(report: CheckReport) -> list[dict[str, Any]]:
    """The attentions of a report, those that are alike as one entry with the site of the first."""
    kinds: dict[str, dict[str, Any]] = {}
    for judged in report.calls:
        facts = facts_of(judged)
        entry = kinds.setdefault(json.dumps(facts), {"site": judged.call.site, "calls": 0, **facts})
        entry["calls"] += 1
    return list(kinds.values())


def run_of(report: CheckReport) -> dict[str, Any]:
    """Of a run: how many calls were judged how, and the largest distance between the two readings of the scale."""
    verdicts = [judged.verdict for judged in report.calls]
    pairs = [
        (judged.call.scale.numeric, judged.call.scale.symbolic)
        for judged in report.calls
        if judged.call.scale.numeric is not None and judged.call.scale.symbolic
    ]
    return {
        "verdicts": {name: verdicts.count(name) for name in sorted(set(verdicts))},
        "read_twice": len(pairs),
        "apart": max((abs(numeric / symbolic - 1.0) for numeric, symbolic in pairs), default=None),
        "not_measured": len(report.not_measured),
    }


def family(model_type: str) -> dict[str, Any]:
    """The record of a model type."""
    config = default_config(model_type)
    cls = model_classes(config)[0]
    with torch.device("meta"):
        # batched_mm: the meta device has no nonzero, which eager experts ask for
        whole = cls._from_config(config, attn_implementation="eager", experts_implementation="batched_mm").eval()
    small = build(small_config(model_type), "eager", torch.float32)
    return {
        "model_type": model_type,
        "class": cls.__name__,
        "fields": fields_of(config),
        "rotary_config": bool(getattr(config, "rope_parameters", None)),
        "calls": calls_of(sqrtdk.check(whole, static=True)),
        "run": run_of(sqrtdk.check(small)),
    }


def main() -> None:
    """Measure, and write after each family: what was interrupted is not lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all of the list by default")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    old = json.loads(options.output.read_text(encoding="utf-8")) if options.types and options.output.exists() else {}
    families = {entry["model_type"]: entry for entry in old.get("families", [])}
    failed = dict(old.get("failed", {}))
    for model_type in options.types or TYPES:
        families.pop(model_type, None)
        failed.pop(model_type, None)
        try:
            families[model_type] = family(model_type)
        except (NotBuiltError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            failed[model_type] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(model_type, failed.get(model_type, families.get(model_type, {}).get("run")), flush=True)
        record = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": {
                "sqrtdk": sqrtdk.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
            },
            "machine": cpu_name(),
            "families": [families[name] for name in sorted(families)],
            "failed": dict(sorted(failed.items())),
        }  # fmt: skip
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
