"""What to change in B for a proven cause: the weights, the field of its config, or the key of its GGUF file.

A sentence of `messages/words/answers.toml` is found by what the edit changes ("base") and by B's value, else by which
side has it: "drop" if only B has, "set" otherwise. What serves B may take the change as an option:

    vllm serve MODEL --hf-overrides '{"rms_norm_eps": 1e-06}'
    python -m sglang.launch_server --model-path MODEL --json-model-override-args '{"rms_norm_eps": 1e-06}'
    llama-server -m model.gguf --override-kv gemma2.rope.freq_base=float:10000
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqrtdk.answers.edit import Value, shown
from sqrtdk.messages import Message, catalogue_text, joined, placeholders
from sqrtdk.messages._catalogue import topic

# by the kind of the server: what may serve it, and how that takes a change
SERVED_BY = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "llama-server": ("llama_cpp",),
    "ollama": ("ollama",),
    "openai": ("vllm", "sglang", "llama_cpp"),
    "completions": ("vllm", "sglang", "llama_cpp"),
}
# by what an edit changes: fields of a config, of which the first that A's has is said
CONFIG_FIELDS = {
    "base": ("rope_parameters", "rope_theta"),
    "second_base": ("rope_parameters",),
    "linear": ("rope_parameters", "rope_scaling"),
    "scaling": ("rope_parameters", "rope_scaling"),
    "length_factor": ("rope_parameters", "rope_scaling"),
    "window": ("sliding_window",),
    "window_layers": ("layer_types",),
    "softcap": ("attn_logit_softcapping",),
    "final_cap": ("final_logit_softcapping",),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "residual_factor": ("residual_multiplier",),
    "logits_divisor": ("logits_scaling",),
    "head": ("tie_word_embeddings",),
}
# model types of transformers whose architecture has another name in a GGUF file
ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "gpt_neox": "gptneox",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
}  # fmt: skip
UNCAPPED = "1e9"  # c tanh(z / c) is z for every z that occurs: llama.cpp always caps a Gemma 2
ALL_KEYS = 2**20  # a window that is longer than any prompt: llama.cpp always gives a Gemma 2 one


@dataclass(frozen=True, slots=True)
class GgufKey:
    """A key of a GGUF file.

    Attributes:
        name: Without the architecture in front.
        kind: "float", "int" or "str", as `--override-kv` has it.
        value: The value of A's number; None for the number itself.
    """

    name: str
    kind: str
    value: Callable[[Value], str] | None = None

    def override(self, architecture: str, a: Value) -> str:
        """Return it as `--override-kv` takes it.

        Example:
            >>> GGUF_KEYS["base"].override("llama", 500000.0)
            'llama.rope.freq_base=float:500000'
        """
        return f"{architecture}.{self.name}={self.kind}:{self.value(a) if self.value else f'{a:.6g}'}"


GGUF_KEYS = {
    "base": GgufKey("rope.freq_base", "float"),
    "linear": GgufKey("rope.scaling.factor", "float"),
    "window": GgufKey("attention.sliding_window", "int", lambda a: str(ALL_KEYS if a is None else int(float(a)))),
    "softcap": GgufKey("attn_logit_softcapping", "float", lambda a: UNCAPPED if a is None else f"{a:.6g}"),
    "final_cap": GgufKey("final_logit_softcapping", "float", lambda a: UNCAPPED if a is None else f"{a:.6g}"),
    "norm_eps": GgufKey("attention.layer_norm_rms_epsilon", "float"),
    "residual_factor": GgufKey("residual_scale", "float"),
    "logits_divisor": GgufKey("logit_scale", "float"),
}


def fix_of_edit(what: str, a: Value, b: Value, *, kind: str = "", config: Any = None) -> Message | str:
    """Return what to change in B, "" if the catalogue has no advice.

    Args:
        what: What the edit changes, see `sqrtdk.answers.edit.Edit`.
        a: What A has.
        b: What B has.
        kind: Kind of the server, a key of `DIALECTS`; "" if B is none.
        config: Of A, for the architecture of a GGUF file.

    Example:
        >>> fix_of_edit("norm_eps", 1e-6, 1e-3)
        'set rms_norm_eps to 1e-06 in the config that B reads'
    """
    known = topic("answers")
    codes = ("drop",) if a is None else (str(b), "set")
    key = next((f"fix.{what}.{code}" for code in codes if f"fix.{what}.{code}" in known), None)
    if key is None:
        return ""
    values: dict[str, Any] = {"a": shown(a), "b": shown(b)}
    if isinstance(a, float | int) and isinstance(b, float | int) and b:
        values["ratio"] = f"{a / b:.6g}"
    field = _field(what, config) or next(iter(CONFIG_FIELDS.get(what, ("",))))
    values["field"] = "rope_parameters.rope_theta" if (what, field) == ("base", "rope_parameters") else field
    names = placeholders(catalogue_text(f"answers.{key}").en)
    if not names <= values.keys():
        return ""  # no factor makes the scale of a side that has 0
    fix = Message(f"answers.{key}", **{name: values[name] for name in sorted(names)})
    flags = [Message(f"answers.flag.{name}", **given) for name, given in _options(what, a, b, kind, config)]
    return Message("answers.fix.with_flags", fix=fix, flags=joined(flags, "semicolon")) if flags else fix


def _options(what: str, a: Value, b: Value, kind: str, config: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what may serve B, with what its option takes."""
    field = _field(what, config)
    has_key = what in GGUF_KEYS and (what != "linear" or _unscaled(b, config))
    for name in SERVED_BY.get(kind, ()):
        if name in ("vllm", "sglang") and field:
            yield name, {"json": json.dumps({field: getattr(config, field)})}
        elif name in ("llama_cpp", "ollama") and has_key:
            model_type = str(getattr(config, "model_type", ""))
            architecture = ARCHITECTURES.get(model_type, model_type) or "ARCHITECTURE"
            yield name, {"override": GGUF_KEYS[what].override(architecture, a)}


def _field(what: str, config: Any) -> str:
    """Return the field of A's config that sets what an edit changes; "" if it has none."""
    # a config of transformers 5 has rope_theta in rope_parameters
    return next((name for name in CONFIG_FIELDS.get(what, ()) if _is_json(getattr(config, name, ...))), "")


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))


def _unscaled(b: Value, config: Any) -> bool:
    """Return whether A scales no positions and B does: then the file's factor has to be 1."""
    settings = getattr(config, "rope_parameters", None) or {}
    return isinstance(b, float | int) and b > 1 and settings.get("rope_type", "default") == "default"
