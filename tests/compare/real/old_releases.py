"""What two older releases of transformers compute wrongly, as cases: a model there and the same in the current one.

transformers 5.2.0, GPT-2: under SDPA `scale_attn_weights=False` and `scale_attn_by_inverse_layer_idx=True` are lost;
`GPT2Attention.forward` hands no scale to the attention, whose default is 1/sqrt(E). Eager honours both.

transformers 5.2.0, DeepSeek-V2: `DeepseekV2Attention` scales by 1/sqrt(E) alone; with YaRN and `mscale_all_dim` the
scale has the factor mscale^2, mscale = 0.1 mscale_all_dim log(factor) + 1. Eager and SDPA alike.

transformers 4.55.0, GPT-BigCode: `scaling = head_dim ** 0.5`, a scale that is inverted. Eager and SDPA alike, unless
`scale_attn_weights=False`.
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tests.compare.real.small import randomised, tokens

HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ.get("SQRTDK_REAL", HERE.parents[2] / "out" / "real"))
TEXT = {"vocab_size": 160, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HEAD_DIM = 20  # 3 heads, so that no layer's number is the root of the number of heads
GPT2 = TEXT | {"n_embd": 3 * HEAD_DIM, "n_layer": 3, "n_head": 3, "n_positions": 128}
DEEPSEEK = TEXT | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,  # no experts: attention is all that may differ
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "rope_theta": 10000.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
MSCALE = 0.1 * 0.707 * math.log(4.0) + 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model of an older release.

    Attributes:
        name: of the case, without the attention.
        release: of transformers.
        family: prefix of the classes' names.
        fields: of the config.
        attn: "eager" or "sdpa".
        ratio: scale of each layer there over that of the current release; all 1 where it has no error.
    """

    name: str
    release: str
    family: str
    fields: dict[str, Any]
    attn: str
    ratio: tuple[float, ...]

    @property
    def key(self) -> str:
        """Of its files."""
        return f"{self.name}-{self.attn}"


def _cases(release: str, name: str, family: str, fields: dict[str, Any], **ratios: tuple[float, ...]) -> list[Case]:
    return [Case(name, release, family, fields, attn, ratio) for attn, ratio in ratios.items()]


INVERTED = (float(HEAD_DIM),) * 3
ALIKE3, ALIKE2 = (1.0,) * 3, (1.0,) * 2
CASES = [
    *_cases("5.2.0", "gpt2", "GPT2", GPT2, eager=ALIKE3, sdpa=ALIKE3),
    *_cases(
        "5.2.0",
        "gpt2-layers",
        "GPT2",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        eager=ALIKE3,
        sdpa=(1.0, 2.0, 3.0),
    ),
    *_cases(
        "5.2.0", "gpt2-unscaled", "GPT2", GPT2 | {"scale_attn_weights": False}, eager=ALIKE3, sdpa=(HEAD_DIM**-0.5,) * 3
    ),
    *_cases("5.2.0", "deepseek-v2", "DeepseekV2", DEEPSEEK | {"rope_parameters": PLAIN}, eager=ALIKE2, sdpa=ALIKE2),
    *_cases(
        "5.2.0",
        "deepseek-v2-yarn",
        "DeepseekV2",
        DEEPSEEK | {"rope_parameters": YARN},
        eager=(MSCALE**-2,) * 2,
        sdpa=(MSCALE**-2,) * 2,
    ),
    *_cases("5.2.0", "deepseek-v3-yarn", "DeepseekV3", DEEPSEEK | {"rope_parameters": YARN}, eager=ALIKE2, sdpa=ALIKE2),
    *_cases("4.55.0", "bigcode", "GPTBigCode", GPT2, eager=INVERTED, sdpa=INVERTED),
    *_cases("4.55.0", "bigcode-heads", "GPTBigCode", GPT2 | {"multi_query": False}, eager=INVERTED, sdpa=INVERTED),
    *_cases(
        "4.55.0", "bigcode-unscaled", "GPTBigCode", GPT2 | {"scale_attn_weights": False}, eager=ALIKE3, sdpa=ALIKE3
    ),
]


def current(case: Case) -> nn.Module:
    """The same model of the release that is installed here."""
    import transformers

    config = getattr(transformers, f"{case.family}Config")(**copy.deepcopy(case.fields))
    model = getattr(transformers, f"{case.family}{'LMHeadModel' if case.family == 'GPT2' else 'ForCausalLM'}")
    return randomised(model._from_config(config, attn_implementation=case.attn))


def python_of(release: str) -> Path:
    """The interpreter of an environment with that release; it need not be there."""
    return ENVIRONMENTS / f"transformers-{release}" / "bin" / "python"


def run_old(release: str, folder: Path) -> dict[str, Path]:
    """Run all cases of a release in its environment.

    Args:
        release: of transformers.
        folder: gets weights and trace files.

    Returns:
        The trace file of each case, by key.
    """
    from safetensors.torch import save_file

    spec = {}
    for case in (case for case in CASES if case.release == release):
        model = current(case)
        tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        save_file(tensors | {"tokens": tokens()}, folder / f"weights-{case.name}.safetensors")
        spec[case.key] = {
            "config": type(model.config).__name__,
            "model": type(model).__name__,
            "fields": case.fields,
            "attn": case.attn,
            "weights": f"weights-{case.name}",
        }
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [python_of(release), HERE / "old_side.py", folder / "spec.json", folder, folder]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # its own packages alone
    ran = subprocess.run(command, capture_output=True, text=True, env=plain | {"HF_HUB_OFFLINE": "1"})
    if ran.returncode:
        raise RuntimeError(f"transformers {release} failed:\n{ran.stderr}")
    return {key: folder / f"{key}.safetensors" for key in spec}
