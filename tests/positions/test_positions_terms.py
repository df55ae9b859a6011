"""Position terms against loops over i and j, and what an implementation relies on: blocks, dtypes, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from sqrtdk.positions import POSITIONS, PositionTerm, alibi_slopes, transformer_xl
from tests.positions.positions_cases import CASES, block, made
from tests.positions.positions_oracle import B, E, H
from tests.tolerances import complaint

HALF = (torch.float16, torch.bfloat16)
every_term = pytest.mark.parametrize("name", CASES)


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in tensors]


class Caller(nn.Module):
    """A module, so that its tables can be replaced; a term without tables has gradients too, all zero."""

    def __init__(self, term: PositionTerm) -> None:
        super().__init__()
        self.inner = term

    def forward(self, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return self.inner.term(q, k, rows, columns) + 0.0 * (q.sum() + k.sum())


@every_term
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_the_law(name: str, dtype: torch.dtype) -> None:
    """Half inputs and tables give float32, so that nothing but the inputs is rounded."""
    term, q_k_rows_columns = made(name, dtype), block(dtype)
    assert isinstance(term, PositionTerm)
    assert term.content is CASES[name].content
    actual = term.term(*q_k_rows_columns)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert actual.dtype == wide
    expected = CASES[name].law(term, *doubles(*q_k_rows_columns))
    assert expected.std() > 0.1
    assert complaint(actual.expand(expected.shape), expected, wide, length=16, logit=0.0) is None


@every_term
def test_tables_and_inputs_of_different_dtypes(name: str) -> None:
    term, q_k_rows_columns = made(name, torch.float32), block(torch.float64)
    actual = term.term(*q_k_rows_columns)
    expected = CASES[name].law(term, *q_k_rows_columns)
    assert complaint(actual.expand(expected.shape), expected, torch.float64, length=16, logit=0.0) is None


@every_term
def test_scattered_rows_and_columns(name: str) -> None:
    term, (q, k, _, _) = made(name), block()
    rows, columns = torch.tensor([40, 3, 3, 17, 0]), torch.tensor([5, 1, 30, 2, 2, 900, 0])
    expected = CASES[name].law(term, q, k, rows, columns)
    actual = term.term(q, k, rows, columns).expand(expected.shape)
    assert complaint(actual, expected, torch.float64, length=16, logit=900.0) is None  # angles of 900 radians


@every_term
def test_only_distances_count(name: str) -> None:
    """Far out too: at 100,000 float32 sinusoids of positions would be off by some thousandths."""
    term, (q, k, rows, columns) = made(name, torch.float32), block(torch.float32)
    here, there = (term.term(q, k, rows + by, columns + by) for by in (0, 100_000))
    assert complaint(there, here.double(), torch.float32, length=16, logit=0.0) is None


@every_term
def test_key_heads_broadcast(name: str) -> None:
    term, (q, k, rows, columns) = made(name), block()
    k = k[:, :1]
    repeated = term.term(q, k.expand(B, H, -1, -1).contiguous(), rows, columns)
    torch.testing.assert_close(term.term(q, k, rows, columns), repeated)


@pytest.mark.sampled(1)
@every_term
def test_gradients(name: str) -> None:
    term, (q, k, rows, columns) = made(name), block(rows=3, columns=4)
    caller = Caller(term)
    names = [n for n, _ in caller.named_parameters()]

    def run(q: Tensor, k: Tensor, *tables: Tensor) -> Tensor:
        return functional_call(caller, dict(zip(names, tables, strict=True)), (q, k, rows, columns))

    inputs = [x.detach().clone().requires_grad_() for x in (q, k, *caller.parameters())]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_slopes_may_be_learned() -> None:
    slopes = torch.rand(H, dtype=torch.float64, requires_grad=True)
    q, k, rows, columns = block()

    def run(m: Tensor) -> Tensor:
        return POSITIONS["alibi"](slopes=m).term(q, k, rows, columns)

    assert torch.autograd.gradcheck(run, (slopes,))


@every_term
def test_meta_device(name: str) -> None:
    term = CASES[name].make(device="meta", dtype=torch.bfloat16)
    result = term.term(*block(torch.bfloat16, device="meta"))
    assert result.device.type == "meta"
    assert result.shape[-2:] == (5, 7)
    assert result.dtype == torch.float32


@every_term
def test_empty_blocks(name: str) -> None:
    for rows, columns in ((0, 7), (5, 0), (0, 0)):
        assert made(name).term(*block(rows=rows, columns=columns)).shape[-2:] == (rows, columns)


@pytest.mark.sampled(1)
@every_term
def test_one_graph_when_compiled(name: str) -> None:
    term, q_k_rows_columns = made(name, torch.float32), block(torch.float32)

    def run(q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return term.term(q, k, rows, columns)

    torch.compiler.reset()  # each term is another version of one function, whose number is limited
    torch.testing.assert_close(
        torch.compile(run, fullgraph=True, backend="aot_eager")(*q_k_rows_columns), run(*q_k_rows_columns)
    )


@every_term
def test_vmap(name: str) -> None:
    term, (q, k, rows, columns) = made(name), block()
    mapped = torch.vmap(lambda q, k: term.term(q, k, rows, columns))(q, k)
    expected = term.term(q, k, rows, columns)
    torch.testing.assert_close(mapped, expected.expand(mapped.shape))


@every_term
def test_new_tables_are_small_and_saved(name: str) -> None:
    """Modules keep their tables in the state dict; at first the term hardly moves a score."""
    torch.manual_seed(1)
    term = CASES[name].make(dtype=torch.float64, device="cpu")
    if not isinstance(term, nn.Module):
        return
    assert {*term.state_dict()} == {n for n, _ in term.named_parameters()}
    values = torch.cat([p.flatten() for n, p in term.named_parameters() if not n.endswith("bias") or "proj" not in n])
    assert 0.01 < values.std() < 0.03
    other = made(name)
    other.load_state_dict(term.state_dict())
    torch.testing.assert_close(other.term(*(at := block())), term.term(*at))


def test_slopes_of_the_paper() -> None:
    """Powers of two: a geometric row from 2^(-8/n); others: those below, then every second of those above."""
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(16) == pytest.approx([2.0 ** (-h / 2) for h in range(1, 17)], rel=1e-15)
    assert alibi_slopes(1) == [2.0**-8]
    for heads in range(1, 70):
        below = 2 ** int(heads.bit_length() - 1)
        above = alibi_slopes(2 * below)
        assert alibi_slopes(heads) == alibi_slopes(below) + above[0::2][: heads - below]


def test_transformer_xl_defaults_to_the_width_of_the_model() -> None:
    assert transformer_xl(H, E).projection.weight.shape == (H * E, H * E)


def test_the_table_is_whole() -> None:
    assert list(POSITIONS) == ["alibi", "t5_bias", "shaw", "transformer_xl", "deberta", "rope", "yarn"]
    assert all(callable(entry) and entry.__doc__ for entry in POSITIONS.values())
