"""Adapters' directories: merged as PEFT merges them, found beside their base, and refused where they don't fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sqrtdk import check
from sqrtdk.errors import ModelError
from sqrtdk.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Update
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from tests.models.adapted import CONFIGS, adapter, base_model, written_base
from tests.support.optional import optional

peft = optional("peft")
SHORT = LoadOptions(seq_len=8)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    written_base(tmp_path / "base")
    return tmp_path


def changed(path: Path, **fields: Any) -> None:
    config = json.loads((path / ADAPTER_CONFIG).read_text())
    (path / ADAPTER_CONFIG).write_text(json.dumps(config | fields))


def test_lora_is_added_with_its_scale_and_rank_pattern(home: Path) -> None:
    tensors = adapter(home / "lora", rank_pattern={}, alpha_pattern={"layers.1.self_attn.q_proj": 3})
    loaded = resolve_model(str(home / "lora"), SHORT)
    base = base_model()
    for layer, scale in ((0, 2.0), (1, 3 / 4)):
        name = f"model.layers.{layer}.self_attn.q_proj"
        up, down = (tensors[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "BA")
        expected = base.get_parameter(f"{name}.weight").double() + scale * up @ down
        assert torch.allclose(loaded.module.get_parameter(f"{name}.weight").double(), expected, rtol=0, atol=2**-22)
    assert loaded.adapter is not None
    assert len(loaded.adapter.updates) == 4
    assert any("an adapter was merged into 4 parameters" in note for note in loaded.notes)


@pytest.mark.filterwarnings("ignore")  # PEFT's own, of older names in transformers
@pytest.mark.parametrize("kind", CONFIGS)
def test_each_kind_gives_what_peft_gives(home: Path, kind: str) -> None:
    """PEFT's own model is the oracle: its forward pass, with the adapter beside the weights."""
    config = CONFIGS[kind](peft)
    model = peft.get_peft_model(base_model(kind), config).eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        for name, p in model.named_parameters():
            own = any(part in name for part in ("lora_", "ia3_", "modules_to_save"))
            if own or (getattr(config, "bias", "none") == "lora_only" and "c_attn" in name and "bias" in name):
                p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(home / "adapter")
    written_base(home / "base", kind)
    changed(home / "adapter", base_model_name_or_path="../base")
    loaded = resolve_model(str(home / "adapter"), SHORT)
    ids = loaded.inputs["input_ids"]  # type: ignore[call-overload]
    with torch.no_grad():
        wanted, got = model(input_ids=ids).logits, loaded.module(input_ids=ids).logits
        moved = (wanted - base_model(kind)(input_ids=ids).logits).abs().max()
    assert float((got - wanted).abs().max()) < 1e-4 * float(moved)


def test_the_base_is_found_by_its_path_beside_the_adapter_and_by_the_option(home: Path) -> None:
    for named in ("../base", str(home / "base"), "org/base"):
        adapter(home / "lora")
        changed(home / "lora", base_model_name_or_path=named)
        assert resolve_model(str(home / "lora"), SHORT).adapter is not None
    changed(home / "lora", base_model_name_or_path="org/elsewhere")
    with pytest.raises(ModelError, match="needs its base model, 'org/elsewhere'") as caught:
        resolve_model(str(home / "lora"), SHORT)
    assert "--base" in str(caught.value.hint)
    assert resolve_model(str(home / "lora"), LoadOptions(seq_len=8, base=home / "base")).adapter is not None


def test_check_audits_an_adapter_and_its_static_base(home: Path) -> None:
    adapter(home / "lora")
    report = check(str(home / "lora"), seq_len=8, laws="none")
    assert [call.verdict for call in report.calls] == ["exact", "exact"]
    report = check(str(home / "lora"), static=True)
    assert any("the adapter was not read" in note for note in report.environment["notes"])


def test_what_does_not_fit_or_is_another_kind_is_refused(home: Path) -> None:
    path = home / "lora"
    for fields, words in (
        ({"peft_type": "VERA"}, "of the kind VERA"),
        ({"megatron_config": {"x": 1}}, "LORA, megatron_config"),
        ({"lora_alpha": "2"}, "lora_alpha|alpha_pattern"),
        ({"alpha_pattern": {"(a+)+b": 2}}, "alpha_pattern"),
    ):
        adapter(path)
        changed(path, **fields)
        with pytest.raises(ModelError, match=words) as caught:
            resolve_model(str(path), SHORT)
        assert caught.value.hint
    tensors = adapter(path)
    first = next(iter(tensors))
    save_file({**tensors, first: torch.zeros(4, 7)}, path / ADAPTER_WEIGHTS)
    with pytest.raises(ModelError, match="does not fit its base model"):
        resolve_model(str(path), SHORT)
    save_file({key.replace("layers.0", "layers.7"): x for key, x in tensors.items()}, path / ADAPTER_WEIGHTS)
    assert any("belong to no module" in note for note in resolve_model(str(path), SHORT).notes)
    (path / ADAPTER_WEIGHTS).rename(path / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        resolve_model(str(path), SHORT)


def test_dora_has_rows_of_the_length_of_its_magnitudes() -> None:
    update = Update("DoRA", torch.randn(2, 6), torch.randn(4, 2), torch.arange(1.0, 5.0), scale=0.5)
    weight: Tensor = torch.randn(4, 6)
    assert torch.allclose(update.applied(weight).norm(dim=1), torch.arange(1.0, 5.0))
    assert torch.allclose(
        update.applied(weight, 0.0), weight / weight.norm(dim=1)[:, None] * torch.arange(1.0, 5.0)[:, None]
    )
