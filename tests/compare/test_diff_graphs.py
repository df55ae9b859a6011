"""Models against what was exported from them: the same where nothing was changed, the cause where something was."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache

from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import DiffReport
from sqrtdk.errors import InvalidValueError
from sqrtdk.graphs import read_onnx
from tests.graphs.exports import build, export, inputs
from tests.hf.families import CACHE

pytest.importorskip("onnxscript", reason="onnxscript is not installed: torch.onnx.export needs it")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

FAMILIES = ("llama", "gpt2", "bert", "t5", "gemma2", "qwen3")
KINDS = ("dynamo", "script", "program")
ALL = [
    (family, attn, kind)
    for family in FAMILIES
    for attn in ("eager", "sdpa")
    for kind in KINDS
    if (family, attn) != ("gemma2", "sdpa")  # transformers refuses it
    and (family, attn, kind) != ("t5", "sdpa", "dynamo")  # the exporter refuses it
]
FAST = [("llama", "sdpa", "dynamo"), ("qwen3", "sdpa", "program")]
SHARP = 6.0  # factor of the weights of q and k: random ones give logits so small that no cap, no scale changes much


def write(model: nn.Module, given: dict[str, Tensor], path: Path, kind: str) -> Path:
    if kind == "program":
        fixed: dict[str, Any] = {**given, "use_cache": False}
        torch.export.save(torch.export.export(model, (), fixed, strict=False), path.with_suffix(".pt2"))
        return path.with_suffix(".pt2")
    export(model, given, path.with_suffix(".onnx"), dynamo=kind == "dynamo")
    return path.with_suffix(".onnx")


def sharp(family: str, attn: str) -> nn.Module:
    model = build(family, attn)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(SHARP)
    return model


def unpadded(family: str) -> dict[str, Tensor]:
    """Inputs that hide no key but by the causal mask."""
    return {name: tensor.clone().fill_(1) if "mask" in name else tensor for name, tensor in inputs(family).items()}


def assert_same(report: DiffReport, count: int) -> None:
    assert (report.unpaired_a, report.unpaired_b) == ((), ())
    assert [(pair.same, pair.reason, pair.causes) for pair in report.pairs] == [(True, None, ())] * count
    assert report.same is True
    assert report.exit_code == 0


def assert_same_sites(report: DiffReport) -> None:
    own, exported = [pair.site_a for pair in report.pairs], [pair.site_b for pair in report.pairs]
    assert [site.removeprefix("net.") for site in own] == [site.removeprefix("net.") for site in exported]


# -- nothing was changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "attn", "kind"),
    [pytest.param(*case, marks=pytest.mark.full if case in FAST else pytest.mark.slow) for case in ALL],
)
def test_every_family_is_the_same(family: str, attn: str, kind: str, tmp_path: Path) -> None:
    given = inputs(family)
    path = write(build(family, attn), given, tmp_path / "model", kind)
    for a, b in ((build(family, attn), path), (path, build(family, attn))):
        report = diff(a, b, given)
        assert_same(report, 6 if family == "t5" else 2)
        assert_same_sites(report)


# -- what was changed is named -----------------------------------------------------------------------------------------


def attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "q_proj")]


def other_scale(model: nn.Module) -> None:
    for module in attentions(model):
        module.scaling *= 1.3


def no_softcap(model: nn.Module) -> None:
    for module in attentions(model):
        module.attn_logit_softcapping = None


def other_base(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            count = module.inv_freq.numel()
            module.inv_freq.copy_(2500.0 ** (-torch.arange(count) / count))


def other_eps(model: nn.Module) -> None:
    for module in attentions(model):
        module.q_norm.variance_epsilon = module.k_norm.variance_epsilon = 1e-2


def mask_off_by_one(model: nn.Module) -> None:
    """Each row sees one key more, the one after it."""
    for module in attentions(model):

        def forward(*args: Any, own: Callable[..., Any] = module.forward, **more: Any) -> Any:
            mask = more["attention_mask"]
            more["attention_mask"] = torch.cat((mask[..., :1], mask[..., :-1]), -1)
            return own(*args, **more)

        module.forward = forward


Plant = Callable[[nn.Module], None]
PLANTS: list[tuple[str, str, Plant, str, Any, Any]] = [
    ("llama", "eager", other_scale, "scale", 0.25, 0.325),
    ("llama", "sdpa", other_scale, "scale", 0.25, 0.325),
    ("gemma2", "eager", no_softcap, "softcap", 50.0, None),
    ("llama", "eager", mask_off_by_one, "mask_offset", 0, -1),
    ("llama", "sdpa", other_base, "rope_base", 10000.0, 2500.0),
    ("qwen3", "eager", other_eps, "qk_norm_eps", 1e-6, 1e-2),
    ("qwen3", "sdpa", other_base, "rope_base", 10000.0, 2500.0),
]
CHANGES = [
    pytest.param(
        *change,
        kind,
        marks=()
        if (number, kind) == (1, "script")
        else pytest.mark.full
        if (number, kind) == (2, "script")
        else pytest.mark.slow,
    )
    for number, change in enumerate(PLANTS)
    for kind in KINDS
]


@pytest.mark.parametrize(("family", "attn", "plant", "cause", "a", "b", "kind"), CHANGES)
def test_what_was_changed_before_the_export(
    family: str, attn: str, plant: Plant, cause: str, a: Any, b: Any, kind: str, tmp_path: Path
) -> None:
    given = unpadded(family)
    changed = sharp(family, attn)
    plant(changed)
    path = write(changed, given, tmp_path / "changed", kind)
    for swapped in (False, True):
        sides = (path, sharp(family, attn)) if swapped else (sharp(family, attn), path)
        report = diff(*sides, given)
        assert (report.unpaired_a, report.unpaired_b, len(report.pairs)) == ((), (), 2)
        for pair in report.pairs:
            assert pair.same is False
            assert [found.name for found in pair.causes] == [cause]
            found = pair.causes[0]
            wanted = (b, a) if swapped else (a, b)
            if cause != "mask_offset":
                for told, number in zip((found.a, found.b), wanted, strict=True):
                    assert told == (None if number is None else pytest.approx(number, rel=1e-3))
            assert found.explained >= 0.99
            assert pair.residue is not None
            assert pair.allowed is not None
            assert pair.residue <= pair.allowed
        assert report.exit_code == 1


# -- inputs ------------------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """As graphs for generation are exported: positions are an input, and what they are exported for is free in size."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self.net(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).logits
        return logits


class Cached(Positions):
    """Keys and values of earlier tokens are inputs too, of any number of tokens."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        made = self.net(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **{CACHE: cache})
        return (made.logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values)))


EARLIER = 3


def write_free(path: Path, model: nn.Module, rows: Tensor, *, cached: bool) -> None:
    """A graph of any number of rows and tokens."""
    tokens, earlier = rows.shape[1], EARLIER if cached else 0
    names = ["input_ids", "attention_mask", "position_ids"]
    places = torch.arange(earlier, earlier + tokens)[None]
    example = [rows, torch.ones(1, earlier + tokens, dtype=torch.long), places]
    free = {name: {0: "rows", 1: "tokens"} for name in names}
    if cached:
        free["attention_mask"] = {0: "rows", 1: "all tokens"}
        attention = attentions(model)[0]
        shape = (1, attention.k_proj.out_features // attention.head_dim, earlier, attention.head_dim)
        past = [f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
        example += [torch.randn(shape) for _ in past]
        free |= {name: {0: "rows", 2: "earlier tokens"} for name in past}
        names += past
    net = (Cached if cached else Positions)(model).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, tuple(example), path, input_names=names, dynamic_axes=free, dynamo=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A model's directory and what was exported from it, by name."""
    folder = tmp_path_factory.mktemp("sides")
    given = inputs("llama")

    @functools.cache
    def made(name: str) -> str:
        path, model = folder / name, build("llama", "sdpa")
        if name == "model":
            model.save_pretrained(path)  # type: ignore[operator]
        elif name == "inputs.safetensors":
            save_file(given, path)
        elif name in ("free.onnx", "cached.onnx"):
            write_free(path, model, given["input_ids"][:1], cached=name == "cached.onnx")
        elif name == "ids.onnx":
            export(model, {"input_ids": given["input_ids"]}, path, dynamo=True)
        else:
            write(model, given, path, "program" if name.endswith(".pt2") else "script")
        return str(path)

    return made


TAKEN = [
    ("model", "fixed.onnx", False),  # the graph's sizes
    ("fixed.onnx", "model", True),
    ("model", "free.onnx", False),  # positions for both
    ("model", "cached.onnx", False),  # no earlier tokens
    ("model", "own.pt2", False),  # the program's own inputs
    ("own.pt2", "model", True),
    ("fixed.onnx", "own.pt2", True),
]
LATER = [
    ("model", "ids.onnx", False),  # a mask that hides nothing is left out
    ("fixed.onnx", "model", False), ("free.onnx", "model", False), ("own.pt2", "model", False),
    ("fixed.onnx", "own.pt2", False), ("model", "fixed.onnx", True),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("a", "b", "from_file"), [*TAKEN, *(pytest.param(*case, marks=pytest.mark.full) for case in LATER)]
)
def test_inputs_are_those_that_both_take(a: str, b: str, from_file: bool, files: Callable[[str], str]) -> None:
    report = diff(files(a), files(b), input_file=files("inputs.safetensors") if from_file else None)
    assert_same(report, 2)
    assert_same_sites(report)


def test_two_graphs_have_no_inputs(files: Callable[[str], str]) -> None:
    with pytest.raises(InvalidValueError, match="no inputs are known"):
        diff(files("fixed.onnx"), files("free.onnx"))


def test_a_cache_is_read_through_where_it_is_empty(files: Callable[[str], str]) -> None:
    """Of earlier tokens nobody knows how their keys were made; without any, the keys' way is known."""
    ids = inputs("llama")["input_ids"][:1]
    tokens = ids.shape[1]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(tokens)[None]}
    for call in read_onnx(files("cached.onnx"), given).calls:
        assert call.missing is None
        assert call.key.projection is not None
        assert call.value.projection is not None
        assert [step.name for step in call.key.steps] == ["rope"]
    first = read_onnx(files("cached.onnx"), given).calls[0]
    width = first.key.values.shape[-1]
    heads = len({tuple(row) for row in first.key.projection.features.tolist()})  # type: ignore[union-attr]
    given["attention_mask"] = torch.ones(1, EARLIER + tokens, dtype=torch.long)
    given |= {
        f"past_key_values.{layer}.{part}": torch.randn(1, heads, EARLIER, width)
        for layer in (0, 1)
        for part in ("key", "value")
    }
    for call in read_onnx(files("cached.onnx"), given).calls:
        assert call.missing is None
        assert call.key.values.shape[2] == EARLIER + tokens
        assert call.key.projection is None
        assert [step.name for step in call.key.steps] == ["rope"]  # as of a module that is given a cache
