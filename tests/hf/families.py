"""Small random-init configurations of the model families that an audit must get right.

`FAMILIES` builds each config, `ATTENTION_CALLS` counts the attentions of one forward pass from its layers:
decoder-only and encoder-only one a layer; encoder-decoder one an encoder layer and two (self, cross) a decoder layer;
CLIP one a layer of each tower; Swin one a block. Head dimension 16 with 4 heads and width 64, so that no two of
them are equal; two key/value heads where the family groups.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers as hf
from transformers import PretrainedConfig

from tests.support.needs import at_least

# What transformers calls the cache of keys and values, as an argument and in an output: "cache" from 5.24 on, where the
# older name gives a FutureWarning.
CACHE = "cache" if at_least("transformers", "5.24") else "past_key_values"

TEXT = {"vocab_size": 160, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = TEXT | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = LLAMA | {"num_key_value_heads": 2}
BERT = LLAMA | {"type_vocab_size": 2}
SEQ2SEQ = TEXT | {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "rope_theta": 10000.0,
}
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": YARN,
}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": lambda: hf.GPT2Config(
        **TEXT, n_embd=64, n_layer=2, n_head=4, n_positions=128, architectures=["GPT2LMHeadModel"]
    ),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        **TEXT,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=128,
        architectures=["GPTNeoForCausalLM"],
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**LLAMA, architectures=["GPTNeoXForCausalLM"]),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(
        **TEXT, n_embd=64, n_layer=2, n_head=4, n_positions=128, architectures=["GPTBigCodeForCausalLM"]
    ),
    "opt": lambda: hf.OPTConfig(
        **TEXT,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        architectures=["OPTForCausalLM"],
    ),
    "bloom": lambda: hf.BloomConfig(**TEXT, hidden_size=64, n_layer=2, n_head=4, architectures=["BloomForCausalLM"]),
    "falcon": lambda: hf.FalconConfig(
        **TEXT, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, architectures=["FalconForCausalLM"]
    ),
    "llama": lambda: hf.LlamaConfig(**GROUPED, architectures=["LlamaForCausalLM"]),
    "mistral": lambda: hf.MistralConfig(**GROUPED, head_dim=16, sliding_window=8, architectures=["MistralForCausalLM"]),
    "mixtral": lambda: hf.MixtralConfig(
        **GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, architectures=["MixtralForCausalLM"]
    ),
    "qwen2": lambda: hf.Qwen2Config(**GROUPED, architectures=["Qwen2ForCausalLM"]),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=24, architectures=["Qwen3ForCausalLM"]),
    "gemma2": lambda: hf.Gemma2Config(
        **GROUPED,
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=8,
        attn_logit_softcapping=50.0,
        architectures=["Gemma2ForCausalLM"],
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **GROUPED,
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        architectures=["Gemma3ForCausalLM"],
    ),
    "granite": lambda: hf.GraniteConfig(**GROUPED, attention_multiplier=0.0625, architectures=["GraniteForCausalLM"]),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **(DEEPSEEK | {"topk_method": "greedy"}), architectures=["DeepseekV2ForCausalLM"]
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**DEEPSEEK, architectures=["DeepseekV3ForCausalLM"]),
    "phi3": lambda: hf.Phi3Config(**GROUPED, architectures=["Phi3ForCausalLM"]),
    "t5": lambda: hf.T5Config(
        vocab_size=160,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    ),
    "bart": lambda: hf.BartConfig(
        **SEQ2SEQ, max_position_embeddings=128, architectures=["BartForConditionalGeneration"]
    ),
    "whisper": lambda: hf.WhisperConfig(
        **SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=24,
        max_target_positions=48,
        architectures=["WhisperForConditionalGeneration"],
    ),
    "bert": lambda: hf.BertConfig(**BERT, architectures=["BertForMaskedLM"]),
    "roberta": lambda: hf.RobertaConfig(**BERT, architectures=["RobertaForMaskedLM"]),
    "deberta_v2": lambda: hf.DebertaV2Config(
        **BERT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
        max_relative_positions=-1,
        position_biased_input=False,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        architectures=["DebertaV2ForMaskedLM"],
    ),
    "xlnet": lambda: hf.XLNetConfig(
        **TEXT, d_model=64, n_layer=2, n_head=4, d_inner=96, architectures=["XLNetLMHeadModel"]
    ),
    "vit": lambda: hf.ViTConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        architectures=["ViTForImageClassification"],
    ),
    "clip": lambda: hf.CLIPConfig(
        text_config=LLAMA | {"max_position_embeddings": 24},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
        projection_dim=40,
        architectures=["CLIPModel"],
    ),
    "swinv2": lambda: hf.Swinv2Config(
        image_size=32,
        patch_size=4,
        embed_dim=32,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
        architectures=["Swinv2ForImageClassification"],
    ),
    "detr": lambda: hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=hf.ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            layer_type="basic",
            out_features=["stage2"],
        ),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_queries=10,
        architectures=["DetrForObjectDetection"],
    ),
}

ATTENTION_CALLS: dict[str, int] = {
    "gpt2": 2,
    "gpt_neo": 2,
    "gpt_neox": 2,
    "gpt_bigcode": 2,
    "opt": 2,
    "bloom": 2,
    "falcon": 2,
    "llama": 2,
    "mistral": 2,
    "mixtral": 2,
    "qwen2": 2,
    "qwen3": 2,
    "gemma2": 2,
    "gemma3": 2,
    "granite": 2,
    "deepseek_v2": 2,
    "deepseek_v3": 2,
    "phi3": 2,
    "t5": 2 + 2 * 2,
    "bart": 2 + 2 * 2,
    "whisper": 2 + 2 * 2,
    "bert": 2,
    "roberta": 2,
    "deberta_v2": 2,
    "xlnet": 2,
    "vit": 2,
    "clip": 2 + 2,
    "swinv2": 2 + 1,
    "detr": 2 + 2 * 2,
}

for name, version in {"qwen3": "4.51", "gemma3": "4.50", "deepseek_v2": "4.54", "deepseek_v3": "4.51"}.items():
    if not at_least("transformers", version):
        del FAMILIES[name], ATTENTION_CALLS[name]

# As the installed transformers says. That of 5.20 lets Gemma 2 have SDPA, and leaves its softcap out there.
EAGER_ONLY = tuple(
    name for name, config in FAMILIES.items() if not getattr(hf, config().architectures[0])._supports_sdpa
)
# Each family with each attention that it has.
CASES = [
    (name, attn)
    for name in FAMILIES
    for attn in ("eager", "sdpa")
    if attn == "eager" or name not in (*EAGER_ONLY, "gemma2")
]


def build(config: PretrainedConfig, attn: str) -> hf.PreTrainedModel:
    """The model of a config; a convolutional backbone has no attention to choose."""
    choice = {"": attn, "backbone_config": "eager"} if "backbone_config" in config.sub_configs else attn
    if config.architectures:
        return getattr(hf, config.architectures[0])._from_config(config, attn_implementation=choice)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=choice)
