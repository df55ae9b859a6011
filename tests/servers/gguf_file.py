"""Writes the tests' model as a GGUF of llama.cpp, with one token for each byte."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch


def byte_letters() -> list[str]:
    """The letters by which GPT-2's tokenizer writes the 256 bytes, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(shown)))
    return [letters[byte] for byte in range(256)]


def write_gguf(path: Path, model: torch.nn.Module, *, bos: bool = False, base: float | None = None) -> Path:
    """Write a Llama of transformers in float32; `base` is another base of the rotation than its own."""
    config, state = model.config, model.state_dict()
    head = config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(base or config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = byte_letters()
    writer.add_token_list(letters)
    writer.add_token_types([1] * len(letters))
    writer.add_token_merges([f"{letters[0]} {letters[0]}"])  # one that no text has
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(bos)

    def put(name: str, tensor: torch.Tensor) -> None:
        writer.add_tensor(name, tensor.float().numpy().copy())

    def interleaved(rows: torch.Tensor) -> torch.Tensor:
        # llama.cpp rotates neighbours, transformers the two halves
        return rows.view(-1, 2, head // 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)

    put("token_embd.weight", state["model.embed_tokens.weight"])
    put("output_norm.weight", state["model.norm.weight"])
    put("output.weight", state["lm_head.weight"])
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            put(f"blk.{layer}.{theirs}.weight", state[f"model.layers.{layer}.{ours}.weight"])
        for letter in "qk":
            rows = state[f"model.layers.{layer}.self_attn.{letter}_proj.weight"]
            put(f"blk.{layer}.attn_{letter}.weight", interleaved(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
