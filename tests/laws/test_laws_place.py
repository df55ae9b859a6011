"""Law `place`: heads that are split or merged by a view are found, whatever else moves tokens about is let pass."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sqrtdk import check
from sqrtdk.audit.records import LawAnswer
from tests.hf.small import build, inputs_of, needs, small_config

HEADS, WIDTH = 4, 32
Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads_first(x: Tensor) -> Tensor:
    """(B, L, H E) to (B, H, L, E), as it is meant."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def rows_first(o: Tensor) -> Tensor:
    """(B, H, L, E) to (B, L, H E), as it is meant."""
    return o.transpose(1, 2).flatten(2)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


CORES: dict[str, Core] = {"eager": eager, "sdpa": F.scaled_dot_product_attention}


class Mixer(nn.Module):
    """An attention whose split and merge are arguments, alone or inside a block."""

    def __init__(self, split: Any = heads_first, merge: Any = rows_first, core: Core = eager) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.split, self.merge, self.core = split, merge, core

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        return self.o(self.merge(self.core(q, k, v)))


class Stack(nn.Module):
    """Two layers behind an embedding."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(attention() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return x


def answers(model: nn.Module, inputs: Any) -> list[LawAnswer]:
    return [answer for answer in check(model.eval(), inputs, laws="place").laws if answer.law == "place"]


def states(model: nn.Module, inputs: Any) -> dict[str, str]:
    return {answer.about: answer.state for answer in answers(model, inputs)}


def x_of(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randn(batch, length, WIDTH)


IDS = torch.arange(24).view(2, 12) * 7 % 50
MERGES: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda o: o.reshape(o.shape[0], o.shape[2], -1),
    "of B * H": lambda o: o.flatten(0, 1).reshape(o.shape[0], o.shape[2], -1),
    "features first": lambda o: o.mT.reshape(o.shape[0], o.shape[2], -1),
    "batch last": lambda o: o.permute(1, 2, 0, 3).reshape(o.shape[0], o.shape[2], -1),
}
SPLITS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(x.shape[0], HEADS, x.shape[1], -1),
    "features first": lambda x: x.reshape(x.shape[0], HEADS, -1, x.shape[1]).mT,
    "heads before batch": lambda x: x.reshape(HEADS, x.shape[0], x.shape[1], -1).transpose(0, 1),
}


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("merge", MERGES)
def test_heads_merged_by_a_view_are_found(merge: str, core: str) -> None:
    found = {answer.about: answer for answer in answers(Mixer(merge=MERGES[merge], core=CORES[core]), x_of())}
    assert found["merge"].finding is not None
    assert found["split"].state == "kept"
    assert found["merge"].finding.severity == "warn"
    assert "merged by a view" in found["merge"].reason
    assert "transpose(1, 2)" in found["merge"].finding.fix


@pytest.mark.parametrize("split", SPLITS)
def test_heads_split_by_a_view_are_found(split: str) -> None:
    found = {answer.about: answer for answer in answers(Mixer(SPLITS[split]), x_of())}
    assert found["split"].finding is not None
    assert found["merge"].state == "kept"
    assert found["split"].finding.severity == "warn"
    assert "split by a view" in found["split"].reason


def test_the_words_say_where_a_token_went() -> None:
    model = Mixer(SPLITS["view"], MERGES["reshape"])
    split, merge = (answer.reason for answer in answers(model, x_of()))
    assert split == "heads are split by a view: token 4 reaches head 1 alone, in rows 4 to 7 of the query"
    assert merge == "heads are merged by a view: row 6 of the attention reaches 4 rows of the output"


def test_a_layer_that_is_wrong_is_named_in_a_model_of_ids() -> None:
    torch.manual_seed(1)
    model = Stack(lambda: Mixer(merge=MERGES["reshape"]))
    found = {answer.about: answer for answer in answers(model, {"input_ids": IDS})}
    assert (found["merge"].site, found["split"].state) == ("layers.0", "kept")


class Fused(nn.Module):
    """One projection of q, k and v, in a module that is the model."""

    def __init__(self, cut: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.qkv, self.o, self.cut = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), cut

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.cut(self.qkv(x))
        return self.o(rows_first(F.scaled_dot_product_attention(q, k, v)))


@pytest.mark.parametrize(
    ("cut", "state"),
    [
        (lambda t: t.reshape(*t.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4), "kept"),
        (lambda t: t.reshape(t.shape[0], 3, HEADS, t.shape[1], -1).unbind(1), "broken"),
        (lambda t: t.view(3, t.shape[0], HEADS, t.shape[1], -1), "broken"),
        (lambda t: t.view(t.shape[0], HEADS, t.shape[1], -1).chunk(3, -1), "broken"),
    ],
)
def test_one_projection_of_three(cut: Any, state: str) -> None:
    assert states(Fused(cut), x_of())["split"] == state


class Bare(nn.Module):
    """The attention function as a module of its own: heads come in and go out, its parent splits and merges."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager(q, k, v)


@pytest.mark.parametrize(("merge", "state"), [(rows_first, "kept"), (MERGES["reshape"], "broken")])
def test_the_module_around_an_attention_function_is_asked(merge: Any, state: str) -> None:
    class Around(Mixer):
        def __init__(self) -> None:
            super().__init__(merge=merge)
            self.inner = Bare()
            self.core = self.inner

    assert states(Around(), x_of()) == {"split": "kept", "merge": state}


def test_cross_attention_is_asked_by_its_queries() -> None:
    assert states(Mixer(), (x_of(length=10), x_of(length=7))) == {"split": "kept", "merge": "kept"}
    wrong = Mixer(merge=MERGES["reshape"])
    assert states(wrong, (x_of(length=10), x_of(length=7)))["merge"] == "broken"


class Neighbours(Mixer):
    """Convolutions over tokens on the way in and on the way out, and tokens that are shifted by one (RWKV, CvT)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.before(x.mT).mT + F.pad(x, (0, 0, 1, -1))
        return self.after(super().forward(x).mT).mT


class Grouped(Mixer):
    """Two heads of keys and values for four of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2).repeat_interleave(2, 1) for p in (self.k, self.v))
        return self.o(rows_first(eager(heads_first(self.q(x)), k, v)))


class Sorted(Mixer):
    """Each head sorts its tokens by their numbers, and attends among neighbours (Reformer's way)."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = (heads_first(p(x)) for p in (self.q, self.k, self.v))
        order = q[..., 0].argsort(-1)[..., None].expand_as(q)
        o = eager(*(t.gather(2, order) for t in (q, k, v)))
        return self.o(rows_first(torch.empty_like(o).scatter(2, order, o)))


class Pooled(Mixer):
    """Keys and values of pairs of tokens (PVT, Linformer)."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return super().forward(x, x.unflatten(1, (-1, 2)).mean(2))


class Windows(Mixer):
    """Windows of four tokens, shifted by two (Swin)."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        batch = x.shape[0]
        cut = x.roll(-2, 1).reshape(-1, 4, WIDTH)
        return super().forward(cut).reshape(batch, -1, WIDTH).roll(2, 1)


class ChannelsFirst(nn.Module):
    """Heads of maps (B, C, h, w), merged as channels: b (h d) n, as diffusion nets have it."""

    def __init__(self, merge: bool = True) -> None:
        super().__init__()
        self.merge = merge
        self.qkv, self.o = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(1, (HEADS, -1)).flatten(3).mT for t in self.qkv(x).chunk(3, 1))
        o = eager(q, k, v)
        return self.o((o.mT if self.merge else o).reshape(x.shape))


@pytest.mark.parametrize(("merge", "state"), [(True, "kept"), (False, "broken")])
def test_maps_of_channels_first(merge: bool, state: str) -> None:
    assert states(ChannelsFirst(merge), torch.randn(2, WIDTH, 8, 6)) == {"split": "kept", "merge": state}


RIGHT: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "plain": lambda: (Mixer(), x_of()),
    "heads as many as tokens": lambda: (Mixer(), x_of(length=HEADS)),
    "batch as many as tokens": lambda: (Mixer(), x_of(6, 6)),
    "neighbours": lambda: (Neighbours(), x_of()),
    "grouped": lambda: (Grouped(), x_of()),
    "sorted": lambda: (Sorted(), x_of()),
    "pooled": lambda: (Pooled(), x_of()),
    "windows": lambda: (Windows(), x_of()),
    "channels first": lambda: (ChannelsFirst(), torch.randn(2, WIDTH, 4, 3)),
    "torch, batch second": lambda: (nn.TransformerEncoderLayer(WIDTH, HEADS, 32), torch.randn(9, 2, WIDTH)),
    "torch, batch first": lambda: (nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True), x_of()),
    "one head": lambda: (Mixer(lambda x: x[:, None], lambda o: o[:, 0]), x_of()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_moves_other_rows_for_a_reason_is_let_pass(name: str) -> None:
    model, inputs = RIGHT[name]()
    assert "broken" not in states(model, inputs).values()


def test_heads_that_have_tokens_in_orders_of_their_own_are_not_asked() -> None:
    assert states(Sorted(), x_of())["split"] == "not asked"


def test_outputs_generators_and_hooks_are_as_they_were() -> None:
    model, x = Mixer(merge=MERGES["reshape"]).eval(), x_of()
    before, state = model(x), torch.get_rng_state()
    answers(model, x)
    assert torch.equal(model(x), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


TYPES = (
    "llama",
    "bert",
    "gpt2",
    "bart",
    "vit",
    "swin",
    "cvt",
    "t5",
    "deepseek_v3",
    "gemma3_text",
    "falcon",
)


PLANTED = ("llama", "bert", "vit", "whisper", "deepseek_v3", "qwen2_vl", "wav2vec2")


@pytest.mark.full
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", PLANTED)
def test_a_transpose_that_is_left_out_of_a_released_architecture(
    model_type: str, attn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention function gives (B, H, L, E), and its module merges as if it were (B, L, H, E)."""
    needs(model_type)
    model = build(small_config(model_type), attn, torch.float32)
    module, name = importlib.import_module(type(model).__module__), "eager_attention_forward"
    own: Any = getattr(module, name) if attn == "eager" else ALL_ATTENTION_FUNCTIONS["sdpa"]

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        o, weights = own(*args, **kwargs)
        return o.transpose(1, 2).contiguous(), weights

    monkeypatch.setattr(module, name, forgetful)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", forgetful)  # type: ignore[arg-type]
    assert states(model, inputs_of(model)) == {"split": "kept", "merge": "broken"}


@pytest.mark.full
@pytest.mark.parametrize("model_type", TYPES)
def test_released_architectures_keep_it(model_type: str) -> None:
    needs(model_type)
    model = build(small_config(model_type), "eager", torch.float32)
    told = states(model, inputs_of(model))
    assert "broken" not in told.values()
    assert "kept" in told.values()
