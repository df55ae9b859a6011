"""What scale the model families of transformers apply: the record behind the table of docs/en/port.md.

Each family is audited twice, from its default config cut to a few layers of every kind, without any download:

- as it is, in full width on the meta device (`sqrtdk.check(static=True)`): head dimension, scale, what declares it,
  softcap, norms and positions, as a port of that config has to have them. What lacks a field is set by
  `transformers_small.LACKING`, and is in the record; what reads values (`READ_VALUES`) has random weights here as well;
- shrunk, with random weights (`sqrtdk.check`): the model runs, and the slope of its logits against `q . k` is the
  scale of the formula, or the family is not in the table.

    python benchmarks/families.py [--output benchmarks/results/families.json] [TYPE ...]

A type that is built and not judged is recorded with the reasons, one that is not built as failed.

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
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

import sqrtdk
from sqrtdk._environment import cpu_name
from sqrtdk.audit.declared import KNOWN_FIELDS
from sqrtdk.audit.families import MLA_YARN
from sqrtdk.audit.multipliers import ROPE_FIELDS
from sqrtdk.audit.records import CheckReport, JudgedCall
from sqrtdk.messages import fields
from tests.hf.small import LACKING, NotBuiltError, build, default_config, model_classes, small_config

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
    "aimv2_vision_model", "aria_text", "audio-spectrogram-transformer", "axk1", "axk2", "beam", "bert-generation",
    "bigbird_pegasus", "blenderbot-small", "chinese_clip_vision_model", "clip_text_model", "clip_vision_model",
    "cohere2_moe", "convbert", "cosmos3_edge_text", "cpmant", "data2vec-audio", "data2vec-text", "data2vec-vision",
    "decision_transformer", "dinov2_with_registers", "doge", "dpr", "embedding_gemma2_text", "ernie", "exaone_moe",
    "flint", "fsmt", "gemma4_unified_text", "glm_moe_dsa", "glm_ocr_text", "glpn", "gpt_neox_japanese",
    "granite_docling_text", "granite_docling_vision", "granite_swa", "granitemoe_swa", "granitemoeshared", "gte",
    "hy_v3", "hy_v4", "hyperclovax", "ibert", "idefics3_vision", "ijepa", "imagegpt", "inkling_text",
    "internvl_vision", "iquestcoder", "jina_embeddings_v3", "kolibri1", "laguna", "levit", "lfm3", "lw_detr_vit",
    "markuplm", "mellum", "mgp-str", "minimax_m3_vl_text", "mlcd_vision_model", "modernbert-decoder", "molmo2_text",
    "moss_transcribe_diarize_audio", "muse_glimmer_text", "muse_spark_text", "mvp", "neomme", "nllb-moe",
    "nystromformer", "olmo_hybrid", "openai_privacy_filter", "patchtst", "pegasus_x", "pixio", "pixtral", "plbart",
    "pop2piano", "pvt", "pvt_v2", "qianfan_ocr_vision", "qwen2_5_vl_text", "qwen2_audio_encoder", "qwen2_vl_text",
    "qwen3_5_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "radio", "rf_detr_dinov2", "roberta-prelayernorm",
    "roc_bert", "sam3_vit_model", "sam_hq_vision_model", "sam_vision_model", "seamless_m4t", "seamless_m4t_v2",
    "segformer", "sew", "smolvlm_vision", "speecht5", "splinter", "tapas", "timesformer", "tipsv2_text_model",
    "tipsv2_vision_model", "trocr", "ultrabert", "unispeech", "unispeech-sat", "videomae", "visual_bert", "vit_msn",
    "vitdet", "vitpose_backbone", "vivit", "voxtral_encoder", "wav2vec2-bert", "wav2vec2-conformer", "xlm-roberta-xl",
    "yolos", "xlnet", "zamba", "zamba2", "falcon_h1", "jamba", "swin", "swinv2", "timesfm", "timesfm2_5",
    "deepseek_v2", "dbrx", "esm", "longformer", "roformer", "bamba", "bailing_hybrid", "dots1", "donut-swin",
    "flaubert", "gemma3n_text", "glm4v_text", "granitemoehybrid", "hiera", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "jetmoe", "kimi_linear", "layoutlmv3", "lfm2_moe", "lilt", "longcat_flash", "luke", "maskformer-swin",
    "ministral", "moonshine", "nemotron", "recurrent_gemma", "sew-d", "siglip2_vision_model", "squeezebert",
    "swin2sr", "switch_transformers", "xlm", "xmod", "deepseek_v4", "mistral_large4_text", "inkling2_text", "zaya",
    "led", "mobilevit", "groupvit", "hrm_text", "perceiver", "reformer", "vits",
)  # fmt: skip

# Types whose code asks for values, which the meta device has not: experts' nonzero, lengths, a factor of 0 and 1.
READ_VALUES = (
    "dbrx", "jetmoe", "switch_transformers", "sew-d", "xmod", "xlm", "flaubert", "siglip2_vision_model", "vits",
    "longcat_flash", "openai-gpt",
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
        **fields(judged.declared_by),
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
    """Of a run: how many calls were judged how, and the largest distance between the two readings of the scale.

    Where heads have gains of their own the trace compares head by head; a mean over heads is not a distance.
    """
    verdicts = [judged.verdict for judged in report.calls]
    scales = [judged.call.scale for judged in report.calls]
    pairs = [
        (scale.numeric, scale.symbolic)
        for scale in scales
        if scale.numeric is not None and scale.symbolic and scale.per_head is None
    ]
    return {
        "verdicts": {name: verdicts.count(name) for name in sorted(set(verdicts))},
        "read_twice": sum(scale.agree is True for scale in scales),
        "apart": max((abs(numeric / symbolic - 1.0) for numeric, symbolic in pairs), default=None),
        "not_measured": len(report.not_measured),
        "reasons": [
            {"reason": reason, **fields(reason)} for reason in sorted({*filter(None, map(_unjudged, report.calls))})
        ],
    }


def _unjudged(judged: JudgedCall) -> str | None:
    """Why a call was not judged or its scale not read twice; None of one that was."""
    if judged.verdict not in ("exact", "declared"):
        return judged.reason or judged.call.formula
    return None if judged.call.scale.agree else judged.call.scale.reason


def whole_report(cls: Any, config: Any) -> CheckReport:
    """The report on a model in full width."""
    static = config.model_type not in READ_VALUES
    # batched_mm: the meta device has no nonzero, which eager experts ask for
    experts = "batched_mm" if static else "eager"
    with torch.device("meta" if static else "cpu"):
        model = cls._from_config(config, attn_implementation="eager", experts_implementation=experts).eval()
    return sqrtdk.check(model, static=static)


def family(model_type: str) -> dict[str, Any]:
    """The record of a model type."""
    config = default_config(model_type)
    cls = model_classes(config)[0]
    small = build(small_config(model_type), "eager", torch.float32)
    return {
        "model_type": model_type,
        "class": cls.__name__,
        "fields": fields_of(config),
        "set": LACKING.get(model_type, {}),
        "calls": calls_of(whole_report(cls, config)),
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
        except (
            NotBuiltError,
            RuntimeError,
            ValueError,
            TypeError,
            LookupError,
            AssertionError,
            AttributeError,
        ) as error:
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
