"""What forwards of released packages take and return in their own way: the right ones are left in peace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from sqrtdk import check
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from tests.laws.caching_models import HEADS, SIZE, VOCABULARY, WIDTH, Projections, ids, lower_right, noise, turned

MASK = torch.tensor([[1] * 12, [1] * 8 + [0] * 4])


def answers(model: nn.Module, inputs: Any, law: str) -> list[LawAnswer]:
    torch.manual_seed(0)
    return list(check(model.eval(), inputs, laws=law).laws)


def states(model: nn.Module, inputs: Any, law: str) -> dict[str, str]:
    return {answer.about: answer.state for answer in answers(model, inputs, law)}


class Layer(Projections):
    """Causal self-attention with rotated keys in a cache, and what a model may return of it.

    Wrong are: "again" (cached keys are turned once more), "future" (rows see all keys), "q alone".
    """

    def __init__(self, wrong: str | None) -> None:
        super().__init__()
        self.wrong, self.is_causal = wrong, True

    def forward(self, x: Tensor, positions: Tensor, past: Any = None) -> tuple[Tensor, dict[str, Any]]:
        q, k, v = self.heads(x)
        q, k = turned(q, positions), k if self.wrong == "q alone" else turned(k, positions)
        if past is not None:
            old = turned(past[0], torch.arange(past[0].shape[2])) if self.wrong == "again" else past[0]
            k, v = torch.cat((old, k), 2), torch.cat((past[1], v), 2)
        logits = q @ k.mT * SIZE**-0.5
        hidden = ~lower_right(q.shape[2], k.shape[2])
        weights = (logits if self.wrong == "future" else logits.masked_fill(hidden, -torch.inf)).softmax(-1)
        # a state (B, H, E, N) of all tokens, whose E is by chance their number, as that of a Mamba layer
        state = x.sum((1, 2))[:, None, None, None].expand(-1, HEADS, 12, 4)
        return self.back(weights @ v), {"logits": logits, "cache": (k, v), "state": state}


class Causal(nn.Module):
    """Ids to logits; `gives` is what stands beside them."""

    def __init__(self, gives: str = "", wrong: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gives = gives
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layer = Layer(wrong)

    def attend(self, ids: Tensor, positions: Tensor, past: Any = None) -> tuple[Tensor, dict[str, Any]]:
        x = self.embed(ids)
        y, given = self.layer(x, positions, past)
        return self.head(x + y), given


class Whole(Causal):
    """Each step gets all tokens so far beside a cache, and keeps the last of them."""

    def forward(self, x: Tensor, cache: Any = None, return_cache: bool = False) -> Any:
        positions = torch.arange(x.shape[1])
        if cache is not None:
            x, positions = x[:, -1:], positions[-1:]
        out, given = self.attend(x, positions, cache)
        return (out, given["cache"]) if return_cache else out


class Offset(Causal):
    """A step is given the number of cached tokens."""

    def forward(self, x: Tensor, states: Any = None, offset: int = 0) -> Any:
        out, given = self.attend(x, torch.arange(offset, offset + x.shape[1]), states)
        return out, given["cache"]


@pytest.mark.parametrize("model", [Whole, Offset])
def test_steps_as_a_forward_takes_them(model: type[Causal]) -> None:
    assert states(model(), (ids(),), "cache")["dynamic"] == KEPT
    assert states(model(wrong="again"), (ids(),), "cache")["dynamic"] == BROKEN


def test_a_memory_of_no_length_is_no_cache() -> None:
    class Remembering(Causal):
        def forward(self, x: Tensor, mems: Any = None, return_mems: bool = False) -> Any:
            out, _ = self.attend(x, torch.arange(x.shape[1]))
            return (out, [self.embed(x)[:, :0]]) if return_mems else out

    (answer,) = answers(Remembering(), (ids(),), "cache")
    assert (answer.state, answer.reason) == (NOT_ASKED, "it returns no cache")


class Beside(Causal):
    """Returns what stands beside its logits."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        out, given = self.attend(input_ids, positions)
        return out, given[self.gives]


@pytest.mark.parametrize("gives", ["logits", "state"])
def test_what_is_no_row_of_one_position_may_move_with_later_tokens(gives: str) -> None:
    assert states(Beside(gives), (ids(),), "causal") == {"input_ids": KEPT}
    assert states(Beside(gives, "future"), (ids(),), "causal") == {"input_ids": BROKEN}


def test_cached_keys_of_a_tuple_move_with_positions() -> None:
    assert states(Beside("cache"), (ids(),), "shift") == {"position_ids": KEPT}
    assert states(Beside("cache", "q alone"), (ids(),), "shift") == {"position_ids": BROKEN}


class Scored(Projections):
    """Self-attention that returns its logits before the mask beside its rows."""

    def forward(self, x: Tensor, shown: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        logits = q @ k.mT * SIZE**-0.5
        hidden = logits if shown is None else logits.masked_fill(~shown[:, None, None], -1e9)
        return self.back(hidden.softmax(-1) @ v), logits


class Shifting(nn.Module):
    """A feed-forward that gets half of its channels from the token after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        after = F.pad(x[..., : WIDTH // 2], (0, 0, -1, 1))
        return self.linear(torch.cat((after, x[..., WIDTH // 2 :]), -1))


class Convolving(nn.Module):
    """Channels first, a convolution, and back, as the Conformer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(1, 1), Swap(), nn.Conv1d(WIDTH, WIDTH, 3, padding=1), Swap())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Block(nn.Module):
    """Attention, then something that takes no mask."""

    def __init__(self, then: nn.Module) -> None:
        super().__init__()
        self.attention, self.then = Scored(), then

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(x, mask.bool())[0]
        return x + self.then(x)


@pytest.mark.parametrize(
    ("then", "site", "severity"), [(Shifting(), "then", "fail"), (Convolving(), "then.net.2", "note")]
)
def test_the_place_where_padding_enters(then: nn.Module, site: str, severity: str) -> None:
    (answer,) = answers(Block(then), {"x": noise(2, 12, WIDTH), "mask": MASK}, "padding")
    assert answer.finding is not None
    assert (answer.site, answer.finding.severity) == (site, severity)


class BothWays(nn.Module):
    """Two sequences see one another; rows that a mask hides average over all keys."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.forgets = Projections(), Projections(), forgets

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, context_mask: Tensor) -> tuple[Tensor, Tensor]:
        (q, _, v), (k, _, w) = self.one.heads(x), self.two.heads(context)
        hides = torch.ones_like(context_mask) if self.forgets else context_mask
        seen = (mask[:, :, None] & hides[:, None]).bool()
        logits = (q @ k.mT * SIZE**-0.5).masked_fill(~seen[:, None], -1e9)
        return self.one.back(logits.softmax(-1) @ w), self.two.back(logits.softmax(-2).mT @ v)


def test_rows_that_another_mask_hides_see_what_they_will() -> None:
    inputs = {
        "x": noise(2, 12, WIDTH),
        "context": noise(2, 9, WIDTH, seed=3),
        "mask": MASK,
        "context_mask": torch.tensor([[1] * 9, [1] * 7 + [0] * 2]),
    }
    assert states(BothWays(), inputs, "padding") == {"mask": KEPT, "context_mask": KEPT}
    assert states(BothWays(forgets=True), inputs, "padding")["context_mask"] == BROKEN


class Stacked(nn.Module):
    """Returns k and v in one tensor, (2, B, H, n, E), whose first axis is by chance as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Projections()

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.layer.heads(x)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None].bool())
        return self.layer.back(out), torch.stack((k, v))


def test_keys_and_values_in_one_tensor() -> None:
    assert states(Stacked(), {"x": noise(2, 12, WIDTH), "mask": MASK}, "padding") == {"mask": KEPT}


class Packed(nn.Module):
    """All inputs in one dictionary; its `padding_mask` is 1 at tokens, as Keras has it."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        self.embed, self.layer, self.forgets = nn.Embedding(VOCABULARY, WIDTH), Projections(), forgets

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x, shown = self.embed(inputs["token_ids"]), inputs["padding_mask"][:, None, None].bool()
        q, k, v = self.layer.heads(x)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if self.forgets else shown)
        return x + self.layer.back(out)


@pytest.mark.parametrize("forgets", [False, True])
def test_inputs_in_one_dictionary(forgets: bool) -> None:
    inputs = ({"token_ids": ids(), "padding_mask": MASK},)
    found = {answer.law: answer.state for answer in answers(Packed(forgets), inputs, "samples,modes,padding")}
    assert found == {"samples": KEPT, "modes": KEPT, "padding": BROKEN if forgets else KEPT}


class Turning(nn.Module):
    """One attention whose q and k turn by a base, and by a factor slower; with a config."""

    def __init__(self, base: float, by: Tensor | float = 1.0, **config: Any) -> None:
        super().__init__()
        self.layer, self.by, self.base = Projections(), by, base
        self.config = SimpleNamespace(**config)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer.heads(x)
        angle = torch.arange(x.shape[1])[:, None] * self.base ** -(torch.arange(0, SIZE, 2) / SIZE) / self.by

        def turn(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

        return self.layer.back((turn(q) @ turn(k).mT * SIZE**-0.5).softmax(-1) @ v)


def test_a_block_of_a_law_that_it_does_not_name() -> None:
    factor = {"rope_base": 1000.0, "rope_adjustments": {"factor": 4.0}}
    assert states(Turning(1000.0, 4.0, **factor), noise(2, 12, WIDTH), "configured") == {"frequencies": KEPT}
    assert states(Turning(1000.0, 1.0, **factor), noise(2, 12, WIDTH), "configured") == {"frequencies": BROKEN}


def test_a_field_that_may_change_the_frequencies() -> None:
    fields = {"rope_base": 1000.0, "rope_condense_ratio": 4}
    (answer,) = answers(Turning(1000.0, 4.0, **fields), noise(2, 12, WIDTH), "configured")
    assert (answer.state, answer.reason) == (NOT_ASKED, "what config.rope_condense_ratio makes of them is not known")
    fields["rope_condense_ratio"] = 1
    assert states(Turning(1000.0, 4.0, **fields), noise(2, 12, WIDTH), "configured") == {"frequencies": BROKEN}


def test_local_layers_with_a_base_of_their_own_are_not_scaled() -> None:
    fields = {"rope_base": 1e6, "rope_local_base_freq": 1e3, "rope_adjustments": {"factor": 8.0}}
    assert states(Turning(1e3, 1.0, **fields), noise(2, 12, WIDTH), "configured") == {"frequencies": KEPT}
    assert states(Turning(1e6, 8.0, **fields), noise(2, 12, WIDTH), "configured") == {"frequencies": KEPT}


class Windows(nn.Module):
    """Attention within windows of four tokens; nothing says that samples come first."""

    def __init__(self, over: int) -> None:
        super().__init__()
        self.over, self.layer = over, Projections()

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(self.over, 1)
        windows = x.unflatten(1, (-1, 2)).flatten(0, 1)
        q, k, v = self.layer.heads(windows)
        out = self.layer.back(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out.unflatten(0, (x.shape[0], -1)).flatten(1, 2).movedim(1, self.over)


def test_an_axis_of_samples_that_nothing_names_is_known_by_what_stays() -> None:
    inputs = (noise(4, 12, WIDTH),)
    assert states(Windows(1), inputs, "samples") == {"": KEPT}
    assert states(Windows(0), inputs, "samples") == {"": NOT_ASKED}


class Speech(nn.Module):
    """Tokens last one step or two, samples are padded to the longest, and a convolution sees the padding or not."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked, self.layer = masked, Projections()
        self.embed, self.conv = nn.Embedding(VOCABULARY, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.embed.weight.data += 1.0  # the padding differs from what a convolution adds at an end

    def forward(self, input_ids: Tensor) -> Tensor:
        q, k, v = self.layer.heads(self.embed(input_ids))
        x = self.layer.back(F.scaled_dot_product_attention(q, k, v)) + self.embed(input_ids)
        steps = [row.repeat_interleave(ids % 2 + 1, dim=0) for row, ids in zip(x, input_ids, strict=True)]
        x = nn.utils.rnn.pad_sequence(steps, batch_first=True, padding_value=0.0 if self.masked else 1.0)
        out: Tensor = self.conv(x.mT).mT
        return nn.utils.rnn.pad_sequence(
            [row[: len(own)] for row, own in zip(out, steps, strict=True)], batch_first=True
        )


@pytest.mark.parametrize("masked", [False, True])
def test_a_sample_that_its_content_makes_the_longest_shows_no_padding(masked: bool) -> None:
    tokens = torch.full((3, 12), 2)
    tokens[:, 0] = torch.tensor([3, 2, 2])  # of 13, 12 and 12 steps: what the law puts in place is longer
    inputs = {"input_ids": tokens}
    assert {*states(Speech(masked), inputs, "samples").values()} == {KEPT if masked else BROKEN}


class Compiling(Projections):
    """flex_attention, which compiles itself where nobody compiled it."""

    def __init__(self, by_view: bool) -> None:
        super().__init__()
        self.by_view = by_view

    def forward(self, x: Tensor) -> Tensor:
        out = flex_attention(*self.heads(x))
        return self.o_proj(out.reshape(x.shape)) if self.by_view else self.back(out)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_heads_are_merged_behind_flex_attention() -> None:
    x = noise(2, 12, WIDTH)
    assert states(Compiling(False), (x,), "place") == {"split": KEPT, "merge": KEPT}
    assert states(Compiling(True), (x,), "place") == {"split": KEPT, "merge": BROKEN}
