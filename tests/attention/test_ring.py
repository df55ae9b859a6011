"""Blocks of keys, joined by their lse, are the whole attention: in one process, and round a ring of real ranks."""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from tests.attention import ring_ranks
from tests.attention.ring_ranks import BAD, CASES, LENGTH, OPTIONS, options_of, sides
from tests.monitor.ranks_at_work import run
from tests.support.once import made_once
from tests.support.two_ranks import two_ranks as two_ranks
from tests.tolerances import allowed

LSE = sqrtdk.AuxRequest(lse=True)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "ring-of-four", lambda folder: run(ring_ranks.work_of, 4, folder))


def _whole(option: str) -> dict[str, torch.Tensor]:
    """The attention of one process, with its statistics and gradients."""
    made = sides()
    q, k, v = (made[name].requires_grad_() for name in ("query", "key", "value"))
    options = dict(options_of(option, torch.arange(LENGTH)))
    if option == "documents":
        documents = options.pop("documents")
        options["attn_mask"] = documents[:, None] == documents
    output, aux = sqrtdk.attention(q, k, v, enable_gqa=True, return_aux=True, impl="dense", **options)
    ((output * made["output"]).sum() + (aux.lse * made["lse"]).sum()).backward()
    rows = {name: values.detach() for name, values in aux._asdict().items()}
    return {"output": output.detach(), **rows, "query": q.grad, "key": k.grad, "value": v.grad}


_whole_once = functools.cache(_whole)


def _judge(folder: Path, size: int, order: str, option: str) -> None:
    expected = _whole_once(option)
    seen = torch.zeros(LENGTH, dtype=torch.bool)
    for rank in range(size):
        found = torch.load(folder / f"rank{rank}.pt")[f"{order}-{option}"]
        at = found.pop("at")
        seen[at] = True
        for name, values in found.items():
            places = (..., at, slice(None)) if values.dim() == 4 else (..., at)
            right = expected[name][places]
            size_of = float(right[right.isfinite()].abs().max())
            limit = allowed(torch.float64, length=LENGTH, logit=20.0, magnitude=max(size_of, 1.0), uses=2)
            torch.testing.assert_close(values, right, atol=limit, rtol=0.0, equal_nan=True, msg=f"{name} of {rank}")
    assert seen.all()


@pytest.mark.parametrize(("order", "option"), CASES)
def test_a_ring_of_two_is_the_whole(two_ranks: Path, order: str, option: str) -> None:
    _judge(two_ranks / "ring", 2, order, option)


@pytest.mark.full
@pytest.mark.parametrize(("order", "option"), CASES)
def test_a_ring_of_four_is_the_whole(four_ranks: Path, order: str, option: str) -> None:
    _judge(four_ranks, 4, order, option)


@pytest.mark.parametrize("bad", BAD)
def test_every_rank_hears_what_does_not_fit(two_ranks: Path, bad: str) -> None:
    heard = [torch.load(two_ranks / "ring" / f"rank{rank}.pt")[bad] for rank in range(2)]
    assert heard[0] == heard[1]
    assert "all ranks of a ring pass the same" in heard[0]
    assert "rank 1" in heard[0]


@pytest.mark.parametrize("impl", ["auto", "dense", "tiled", "cpu"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_blocks_go_by_their_places(impl: str, data: st.DataObject) -> None:
    """Rows and keys cut anywhere, with every argument that goes by places, against one call in float64."""
    length, keys = data.draw(st.integers(1, 9), "rows"), data.draw(st.integers(1, 9), "keys")
    cuts = sorted({0, keys, *data.draw(st.lists(st.integers(0, keys), max_size=2), "cuts")})
    middle = data.draw(st.integers(0, length), "middle")
    options: dict[str, Any] = {"is_causal": data.draw(st.booleans(), "causal")}
    options |= data.draw(st.sampled_from([{}, {"window": (2, 1)}, {"window": (0, 3)}]), "window")
    options |= data.draw(st.sampled_from([{}, {"bias": sqrtdk.positions.alibi(2)}, {"softcap": 3.0}]), "bias")
    made = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, generator=made) for n in (length, keys, keys))
    right, aux = sqrtdk.attention(q, k, v, impl="dense", return_aux=LSE, **options)
    dtype = torch.float32 if impl == "cpu" else torch.float64
    for start, stop in ((0, middle), (middle, length)):
        parts = [
            sqrtdk.attention(
                q[:, :, start:stop].to(dtype), k[:, :, a:b].to(dtype), v[:, :, a:b].to(dtype), impl=impl,
                query_offset=start, key_offset=a, return_aux=LSE, **options,
            )
            for a, b in pairwise(cuts)
        ]  # fmt: skip
        output, lse = sqrtdk.merge([output for output, _ in parts], [aux.lse for _, aux in parts])
        limit = allowed(dtype, length=keys, logit=10.0, magnitude=4.0)
        torch.testing.assert_close(output.double(), right[:, :, start:stop], atol=limit, rtol=0.0)
        torch.testing.assert_close(lse.double(), aux.lse[..., start:stop], atol=limit, rtol=0.0)


def test_functions_of_places_and_statistics_go_by_them_too() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64).unbind()
    options: dict[str, Any] = {
        "score_mod": lambda score, b, h, i, j: score - 0.1 * (i - j).abs(),
        "mask_mod": lambda b, h, i, j: (i + j) % 3 > 0,
    }
    right = sqrtdk.measure(q, k, **options)
    cuts = {"query_offset": 2}
    blocks = [sqrtdk.measure(q[:, :, 2:6], k[:, :, a : a + 4], key_offset=a, **cuts, **options) for a in (0, 4)]
    both = blocks[0].merge(blocks[1])
    for name in ("lse", "entropy_nats", "variance", "keys"):
        torch.testing.assert_close(getattr(both, name), getattr(right, name)[..., 2:6])
    half = sqrtdk.attention(q[:, :, 2:6], k, v, query_offset=2, **options)
    torch.testing.assert_close(half, sqrtdk.attention(q, k, v, **options)[:, :, 2:6])


def test_alibi_by_name_goes_by_the_places() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64).unbind()
    for causal in (False, True):
        right = sqrtdk.attention(q, k, v, bias="alibi", is_causal=causal)[:, :, 5:]
        found = sqrtdk.attention(q[:, :, 5:], k, v, bias="alibi", is_causal=causal, query_offset=5)
        torch.testing.assert_close(found, right)


def test_a_merge_has_the_gradients_of_the_whole() -> None:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, generator=made).requires_grad_() for _ in range(3))

    def joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            sqrtdk.attention(q, k[:, :, a : a + 3], v[:, :, a : a + 3], is_causal=True, key_offset=a, return_aux=LSE)
            for a in (0, 3)
        ]
        return sqrtdk.merge([output for output, _ in parts], [aux.lse for _, aux in parts])

    assert torch.autograd.gradcheck(joined, (q, k, v))
    whole = sqrtdk.attention(q, k, v, is_causal=True, return_aux=LSE)
    of_output, of_lse = torch.randn_like(whole[0]), torch.randn_like(whole[1].lse)
    found = torch.autograd.grad(joined(q, k, v), (q, k, v), (of_output, of_lse))
    right = torch.autograd.grad((whole[0], whole[1].lse), (q, k, v), (of_output, of_lse))
    torch.testing.assert_close(found, right)


def test_a_row_that_no_block_shows_is_zero() -> None:
    outputs = [torch.zeros(1, 2, 3), torch.tensor([[[1.0, 2, 3], [0, 0, 0]]])]
    lses = [torch.full((1, 2), -torch.inf), torch.tensor([[0.5, -torch.inf]])]
    for tensor in (*outputs, *lses):
        tensor.requires_grad_()
    output, lse = sqrtdk.merge(outputs, lses)
    assert output.tolist() == [[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]]
    assert lse.tolist() == [[0.5, -torch.inf]]
    output.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (*outputs, *lses))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 8).to(dtype).unbind()
    output = sqrtdk.ring_attention(q, k, v, is_causal=True)
    assert output.dtype is dtype
    right = sqrtdk.attention(q.double(), k.double(), v.double(), is_causal=True)
    assert float((output.double() - right).abs().max()) <= torch.finfo(dtype).eps * float(v.abs().max())


def test_what_does_not_fit_is_said() -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(InvalidValueError, match="alike in all blocks"):
        sqrtdk.merge([x], [torch.zeros(1, 3, 2)])
    with pytest.raises(InvalidValueError, match="1 outputs and 0 lses"):
        sqrtdk.merge([x], [])
    with pytest.raises(InvalidTypeError, match="one for each block"):
        sqrtdk.merge(x, [torch.zeros(1, 2, 3)])
    with pytest.raises(InvalidValueError, match="3 rows and 5 keys"):
        sqrtdk.ring_attention(x, torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))
    with pytest.raises(InvalidTypeError, match="positions are whole numbers"):
        sqrtdk.ring_attention(x, x, x, positions=torch.zeros(3))
    with pytest.raises(InvalidValueError, match=r"documents are \(L,\)"):
        sqrtdk.ring_attention(x, x, x, documents=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InvalidTypeError, match="query_offset is a whole number"):
        sqrtdk.attention(x, x, x, query_offset=1.0)
    with pytest.raises(InvalidValueError, match="rows go by their offset or by the last key"):
        sqrtdk.attention(x, x, x, causal_lower_right=True, key_offset=2)
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 3, device="cpu")
    with pytest.raises(InvalidValueError, match="a BlockMask has no offsets"):
        sqrtdk.attention(x, x, x, block_mask=mask, key_offset=2)


def test_the_options_of_the_cases_change_something() -> None:
    outputs = [_whole_once(option)["output"] for option in (*OPTIONS, "documents")]
    assert all(not torch.equal(outputs[0], other) for other in outputs[1:])
