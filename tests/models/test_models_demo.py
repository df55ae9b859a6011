from __future__ import annotations

import importlib.resources
import json
import math
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from sqrtdk.errors import ModelError
from sqrtdk.models.demo import HEADS, MODEL_DIM, VARIANTS, DemoModel, load_demo, weights_name
from sqrtdk.models.load import iter_attn, resolve_model
from sqrtdk.models.options import LoadOptions

SCALES = {"demo": 64**-0.5, "demo:unscaled": 1.0, "demo:twice": 1 / 64, "demo:inverted": 8.0}
WEIGHTS = importlib.resources.files("sqrtdk.models") / "weights"


def test_the_package_holds_the_four_variants_in_at_most_5_mb() -> None:
    files = [file for file in WEIGHTS.iterdir() if file.name.endswith(".safetensors")]
    assert {file.name for file in files} == {f"{weights_name(variant)}.safetensors" for variant in VARIANTS}
    assert sum(len(file.read_bytes()) for file in files) <= 5_000_000


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_applies_its_scale(variant: str) -> None:
    query, key, value = (torch.randn(2, HEADS, 7, MODEL_DIM // HEADS) for _ in range(3))
    out = VARIANTS[variant](query, key, value)
    logits = query @ key.mT * SCALES[variant]
    logits = logits.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    torch.testing.assert_close(out, logits.softmax(-1) @ value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_future_byte_reaches_a_prediction(variant: str) -> None:
    model = load_demo(variant)
    ids = torch.randint(256, (1, 20))
    changed = ids.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 256
    torch.testing.assert_close(model(ids)[:, :12], model(changed)[:, :12])
    assert not torch.equal(model(ids)[:, 12:], model(changed)[:, 12:])


def test_nothing_in_the_attention_declares_a_scale() -> None:
    for variant in VARIANTS:
        for block in load_demo(variant).blocks:
            own = set(vars(block.attention)) - set(vars(torch.nn.Module()))
            assert own == {"variant"}
            assert set(block.attention._modules) == {"q_proj", "k_proj", "v_proj", "o_proj"}
            assert not dict(block.attention.named_buffers())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_record_tells_the_loss_of_the_shipped_weights(variant: str) -> None:
    record = json.loads((WEIGHTS / f"{weights_name(variant)}.json").read_text())
    reference = json.loads((WEIGHTS / "demo.json").read_text())
    for field in ("seed", "steps", "parameters", "train_bytes", "train_sha256", "torch", "python"):
        assert record[field] == reference[field]
    assert record["variant"] == variant
    assert record["parameters"] == sum(p.numel() for p in load_demo(variant).parameters())
    assert record["train_loss"][0]["step"] == 0
    text = (Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py").read_bytes()[:4096]
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(16, 256)
    with torch.no_grad():
        loss = F.cross_entropy(load_demo(variant)(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()
    assert abs(loss - record["held_out_loss_nats_per_byte"]) < 0.7  # another text, but the same language
    assert loss < math.log(256) / 2


def test_the_right_scale_learned_more_than_none_and_than_the_inverse() -> None:
    loss = {
        v: json.loads((WEIGHTS / f"{weights_name(v)}.json").read_text())["held_out_loss_nats_per_byte"]
        for v in VARIANTS
    }
    assert loss["demo"] < loss["demo:unscaled"] - 0.1
    assert loss["demo:unscaled"] < loss["demo:inverted"] - 0.1


def test_weights_start_so_that_queries_and_keys_have_variance_near_one() -> None:
    torch.manual_seed(0)
    attention = DemoModel("demo").blocks[0].attention
    x = torch.randn(4000, MODEL_DIM)
    for proj in (attention.q_proj, attention.k_proj):
        assert abs(proj(x).var().item() - 1) < 0.1


def test_demo_forms_of_the_model_argument(tmp_path: Path) -> None:
    loaded = resolve_model("demo:twice", LoadOptions(batch=2, seq_len=30, static=True))
    assert loaded.inputs["input_ids"].is_meta
    assert loaded.inputs["input_ids"].shape == (2, 30)
    text = tmp_path / "t.txt"
    text.write_text("ab", encoding="utf-8")
    assert resolve_model("demo", LoadOptions(seq_len=5, text=text)).inputs["input_ids"].tolist() == [
        [97, 98, 97, 98, 97]
    ]
    (only,) = iter_attn("demo")
    assert only.attn == "own"
    assert only.loaded is not None
    assert only.loaded.notes == ()  # neither of the two was asked for by its name
    assert resolve_model("demo", LoadOptions(attn="sdpa")).notes[0].startswith("--attn sdpa was ignored: ")
    with pytest.raises(ModelError, match="no embedded model 'demo:nope'") as caught:
        resolve_model("demo:nope")
    assert "demo:inverted" in caught.value.hint
