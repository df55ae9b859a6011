"""What holds for every module: counts, compilers, autocast, the meta device, and what each refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sqrtdk.nn as modules
from sqrtdk import AuxRequest, positions, scores
from sqrtdk.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from sqrtdk.impl.rows import BLOCK_PAIRS
from sqrtdk.nn import CosineAttention, MultiHeadAttention, RelativeAttention, ScaledDotProductAttention
from sqrtdk.nn import TransformerBlock as Block
from tests.nn.nn_cases import CASES, HEADS, INNER, LENGTH, MODEL, WIDTH, Case, multi_head
from tests.tolerances import complaint, gradient_complaints, half_complaint

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def first(result):  # type: ignore[no-untyped-def]
    return result[0] if isinstance(result, tuple) else result


def test_every_module_has_a_case() -> None:
    public = {name for name in vars(modules) if name.endswith(("Attention", "Block"))}
    assert public == {type(case.make()).__name__ for case in CASES.values()}


@every_case
def test_the_formula_gives_the_count(case: Case) -> None:
    module = case.make()
    held = sum(parameter.numel() for parameter in module.parameters())
    assert module.parameter_count() == held
    assert module.expected_parameters() == held
    assert (module.parameter_formula == "0") == (held == 0)


def test_the_textbook_formula() -> None:
    module = MultiHeadAttention(512, 8, bias=False)
    assert module.parameter_formula == "3 h d_k d_model + d_model^2"
    assert module.parameter_count() == 3 * 8 * 512 * 64 + 512**2
    grouped = MultiHeadAttention(512, 8, kv_heads=2)
    assert grouped.parameter_formula == "h d_k d_model + 2 kv d_k d_model + d_model^2 + (h + 2 kv) d_k + d_model"
    assert grouped.parameter_count() == 512 * 512 + 2 * 2 * 64 * 512 + 512**2 + (8 + 4) * 64 + 512
    wide = MultiHeadAttention(16, 2, head_dim=5, value_head_dim=3, kdim=4)
    assert wide.parameter_formula == "h d_k d_model + h d_k kdim + h d_v d_model + h d_v d_model + " + (
        "(h d_k + h d_k + h d_v) + d_model"
    )


@pytest.mark.sampled(1)
@every_case
def test_a_compiled_module_is_the_same(case: Case) -> None:
    module, inputs = case.make().eval(), case.inputs()
    for x in inputs:
        x.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected, actual = first(module(*inputs)), first(compiled(*inputs))
    assert complaint(actual, expected, torch.float32, length=INNER, logit=10.0) is None
    leaves = {f"input {i}": x for i, x in enumerate(dict.fromkeys(inputs))} | dict(module.named_parameters())
    probe = torch.randn_like(expected)
    wanted, found = (
        dict(zip(leaves, torch.autograd.grad((x * probe).sum(), list(leaves.values())), strict=True))
        for x in (expected, actual)
    )
    wrong = gradient_complaints(found, wanted, torch.float32, length=INNER, logit=10.0, rows=2 * HEADS * LENGTH)
    assert not wrong, wrong


@every_case
def test_autocast_lowers_the_precision_and_not_the_meaning(case: Case) -> None:
    module, inputs = case.make().eval(), case.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        lowered = first(module(*inputs))
    expected = first(module(*inputs))
    error = (lowered.float() - expected).abs().max().item() / expected.abs().max().item()
    assert 0 < error < 64 * torch.finfo(torch.bfloat16).eps


@every_case
def test_the_meta_device_gives_shapes(case: Case) -> None:
    module = case.make(device="meta").eval()
    inputs = [x.to("meta") for x in case.inputs()]
    assert {parameter.device.type for parameter in module.parameters()} <= {"meta"}
    assert first(module(*inputs)).shape == first(case.make().eval()(*case.inputs())).shape


@every_case
def test_dtype_and_state_dict_reach_every_parameter(case: Case) -> None:
    module, other = case.make(dtype=torch.float64).eval(), case.make(dtype=torch.float64).eval()
    assert {parameter.dtype for parameter in module.parameters()} <= {torch.float64}
    inputs = [x.double() for x in case.inputs()]
    if any(True for _ in module.parameters()):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))
        assert not torch.equal(first(module(*inputs)), first(other(*inputs)))
    module.load_state_dict(other.state_dict())
    assert torch.equal(first(module(*inputs)), first(other(*inputs)))


@pytest.mark.parametrize("name", ["dot", "additive", "bilinear", "cosine", "relative", "relative values"])
def test_weights_and_statistics_come_as_asked(name: str) -> None:
    case = CASES[name]
    module, inputs = case.make(dtype=torch.float64), [x.double() for x in case.inputs()]
    request = AuxRequest(collision=True, keys=True)
    plain = module(*inputs, is_causal=True)
    output, weights = module(*inputs, is_causal=True, need_weights=True)
    again, aux = module(*inputs, is_causal=True, return_aux=request)
    _, _, both = module(*inputs, is_causal=True, need_weights=True, return_aux=request)
    assert plain.shape == (2, HEADS, LENGTH, WIDTH)
    for found in (output, again):
        assert complaint(found, plain, torch.float64, length=LENGTH, logit=10.0) is None
    assert complaint(weights.sum(-1), torch.ones(2, HEADS, LENGTH).double(), torch.float64, length=6, logit=10) is None
    for seen in (aux, both):
        assert complaint(seen.collision, weights.square().sum(-1), torch.float64, length=LENGTH, logit=10.0) is None
        assert seen.keys[0, 0].tolist() == [1, 2, 3, 4, 5, 6]
        assert seen.lse is None


def test_statistics_of_the_multi_head_modules() -> None:
    x = torch.randn(2, LENGTH, MODEL)
    request = AuxRequest(entropy_nats=True)
    output, weights, aux = multi_head()(x, x, x, return_aux=request, need_weights=False)
    assert (output.shape, weights, aux.entropy_nats.shape) == (x.shape, None, (2, HEADS, LENGTH))
    _, weights, aux = multi_head()(x[0], x[0], x[0], return_aux=request, average_attn_weights=False)
    assert weights.shape == (HEADS, LENGTH, LENGTH)
    entropy = -(weights * weights.log()).sum(-1)
    assert complaint(aux.entropy_nats, entropy.double(), torch.float32, length=LENGTH, logit=10.0) is None
    output, aux = Block(MODEL, HEADS, 16, batch_first=True)(x, return_aux=request)
    assert (output.shape, aux.entropy_nats.shape) == (x.shape, (2, HEADS, LENGTH))


def test_asking_for_statistics_changes_no_dropout() -> None:
    module, x = ScaledDotProductAttention(WIDTH, dropout=0.5), torch.randn(2, 3, 5, WIDTH)
    found = []
    for extra in ({}, {"return_aux": AuxRequest.all()}):
        torch.manual_seed(0)
        found.append(module(x, x, x, need_weights=True, **extra))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_dropout_is_for_training_and_the_weights_are_the_dropped_ones() -> None:
    module = ScaledDotProductAttention(WIDTH, dropout=0.5)
    q = torch.randn(2, HEADS, 64, WIDTH)
    output, weights = module(q, q, q, need_weights=True)
    assert 0.45 < (weights == 0).double().mean().item() < 0.55
    assert complaint(output, weights.double() @ q.double(), torch.float32, length=64, logit=10.0) is None
    assert (module.eval()(q, q, q, need_weights=True)[1] > 0).all()
    dropped = multi_head(dropout=1.0, bias=False)
    x = torch.randn(2, LENGTH, MODEL)
    assert not dropped(x, x, x, need_weights=False)[0].any()
    assert dropped.eval()(x, x, x, need_weights=False)[0].any()


def test_masks_of_both_kinds_and_types_hold_together() -> None:
    module, x = multi_head(dtype=torch.float64), torch.randn(2, LENGTH, MODEL, dtype=torch.float64)
    seen, real = torch.rand(LENGTH, LENGTH) < 0.7, torch.rand(2, LENGTH) < 0.7
    expected = (seen & real[:, None, :])[:, None].expand(2, HEADS, LENGTH, LENGTH)
    as_float = [torch.zeros(m.shape, dtype=torch.float64).masked_fill(~m, -torch.inf) for m in (seen, real)]
    for attn in (~seen, as_float[0], ~seen.expand(2, 1, LENGTH, LENGTH)):
        for padding in (~real, as_float[1]):
            _, weights = module(x, x, x, padding, attn_mask=attn, average_attn_weights=False)
            assert torch.equal(weights > 0, expected)


def test_a_row_that_sees_nothing_gives_the_bias_of_the_output() -> None:
    module, x = multi_head(), torch.randn(2, LENGTH, MODEL, requires_grad=True)
    nn.init.normal_(module.out_proj.bias)
    padding = torch.tensor([[False] * LENGTH, [True] * LENGTH])
    output, weights = module(x, x, x, key_padding_mask=padding)
    assert torch.equal(output[1], module.out_proj.bias.expand(LENGTH, MODEL))
    assert not weights[1].any()
    with torch.autograd.set_detect_anomaly(True):
        (gradient,) = torch.autograd.grad(output.square().sum() + weights.square().sum(), x)
    assert gradient[0].any()
    assert not gradient[1].any()


BAD = {
    "d_k": (lambda x: ScaledDotProductAttention(16)(x, x, x), InvalidValueError, "scales for d_k = 16"),
    "no whole d_k": (lambda x: ScaledDotProductAttention(8.0), InvalidTypeError, "d_k is a whole number"),
    "heads do not divide": (lambda x: MultiHeadAttention(10, 3), InvalidValueError, "num_heads divides embed_dim"),
    "kv heads": (lambda x: MultiHeadAttention(12, 4, kv_heads=3), InvalidValueError, "kv_heads divides num_heads"),
    "dropout": (lambda x: MultiHeadAttention(12, 4, 1.5), InvalidValueError, "dropout is from 0 to 1"),
    "qk_norm": (lambda x: multi_head(qk_norm="l2"), InvalidValueError, "qk_norm is one of rms, layer"),
    "qk_norm maker": (lambda x: multi_head(qk_norm=lambda width: width), InvalidTypeError, "qk_norm makes a module"),
    "position": (lambda x: multi_head(position=3), InvalidTypeError, "position is a term"),
    "appended": (
        lambda x: multi_head(add_zero_attn=True, position=positions.rope),
        UnsupportedError,
        "append keys that have no position",
    ),
    "4-D": (lambda x: multi_head()(x, x, x), InvalidValueError, "query of 4 dimensions"),
    "channels": (lambda x: multi_head()(x[0], x[0], x[0]), InvalidValueError, "the query has 32 channels"),
    "batch": (
        lambda x: multi_head()(torch.zeros(2, 3, 32), *[torch.zeros(1, 3, 32)] * 2),
        InvalidValueError,
        "have one batch",
    ),
    "mask shape": (
        lambda x: multi_head()(*[torch.zeros(2, 6, 32)] * 3, attn_mask=torch.ones(2, 6).bool()),
        InvalidValueError,
        "attn_mask is",
    ),
    "padding shape": (
        lambda x: multi_head()(*[torch.zeros(2, 6, 32)] * 3, key_padding_mask=torch.ones(6, 2).bool()),
        InvalidValueError,
        "key_padding_mask is",
    ),
    "mask of integers": (
        lambda x: multi_head()(*[torch.zeros(2, 6, 32)] * 3, key_padding_mask=torch.ones(2, 6).long()),
        InvalidTypeError,
        "True is hidden",
    ),
    "activation": (lambda x: Block(8, 2, activation="selu"), InvalidValueError, "activation is relu or gelu"),
    "no activation": (lambda x: Block(8, 2, activation=1), InvalidTypeError, "activation is a function"),
    "value width": (
        lambda x: RelativeAttention(8, 2, relative_values=True)(x, x, x[..., :4]),
        InvalidValueError,
        "relative values have 8 channels",
    ),
    "norm": (lambda x: CosineAttention(4, norm="l1"), InvalidValueError, "norm is one of"),
}


@pytest.mark.parametrize(("call", "kind", "words"), BAD.values(), ids=BAD.keys())
def test_what_is_refused(call, kind: type[Exception], words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind, match=words) as caught:
        call(torch.randn(2, HEADS, LENGTH, WIDTH))
    assert caught.value.hint  # type: ignore[attr-defined]


def test_the_repr_names_the_sizes() -> None:
    assert "d_k=8" in repr(ScaledDotProductAttention(8))
    assert "kv_heads=2" in repr(multi_head(kv_heads=2, score=scores.cosine()))
    assert "norm_first=True" in repr(Block(8, 2, norm_first=True))


def test_a_tensor_as_scale_moves_with_the_module() -> None:
    for module in (multi_head(scale=torch.ones(HEADS, 1, 1)), ScaledDotProductAttention(8, scale=torch.ones(1))):
        assert module.double().scale.dtype == torch.float64
        assert module.expected_parameters() == sum(parameter.numel() for parameter in module.parameters())
    learned = ScaledDotProductAttention(8, scale=nn.Parameter(torch.ones(HEADS, 1, 1)))
    assert learned.parameter_count() == learned.expected_parameters() == HEADS


def test_weights_of_many_rows_come_in_blocks() -> None:
    module, q = CosineAttention(2, norm="rms"), torch.randn(1, 2, 1100, 8, dtype=torch.float64)
    output, weights = module(q, q, q, is_causal=True, need_weights=True)
    assert weights.numel() > BLOCK_PAIRS
    assert complaint(output, module(q, q, q, is_causal=True), torch.float64, length=1100, logit=30.0) is None
    assert complaint(weights @ q, output, torch.float64, length=1100, logit=30.0) is None


@pytest.mark.parametrize(("rows", "keys"), [(0, 3), (3, 0), (0, 0), (1, 1)])
def test_empty_sequences(rows: int, keys: int) -> None:
    module, query, key = multi_head(), torch.randn(2, rows, MODEL), torch.randn(2, keys, MODEL)
    output, weights = module(query, key, key)
    assert output.shape == query.shape
    assert weights.shape == (2, rows, keys)
    assert torch.equal(output, module(query, key, key, need_weights=False)[0])


def test_nothing_hidden_leaks_into_output_or_weights() -> None:
    q, hidden = torch.randn(2, HEADS, LENGTH, WIDTH), torch.arange(LENGTH) == LENGTH - 1
    k, v = q.clone(), q.clone()
    k[..., -1, :], v[..., -1, :] = torch.nan, torch.inf
    q.requires_grad_()
    module = ScaledDotProductAttention(WIDTH)
    output, weights = module(q, k, v, hidden, need_weights=True)
    expected, wanted = module(q, q, q, hidden, need_weights=True)
    assert complaint(output, expected.double(), torch.float32, length=LENGTH, logit=10.0) is None
    assert torch.equal(weights, wanted)
    (gradient,) = torch.autograd.grad(output[..., 0].sum() + weights[..., 0].sum(), q)
    assert gradient.isfinite().all()


def test_weights_have_the_batch_of_the_output() -> None:
    q, v = torch.randn(1, HEADS, LENGTH, WIDTH), torch.randn(3, HEADS, LENGTH, WIDTH)
    output, weights = ScaledDotProductAttention(WIDTH)(q, q, v, need_weights=True)
    assert output.shape[:-1] == weights.shape[:-1] == (3, HEADS, LENGTH)


def test_weights_in_autocast_are_rounded_once() -> None:
    q = torch.randn(2, HEADS, 64, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        output, weights = ScaledDotProductAttention(WIDTH)(q, q, q, need_weights=True)
    rounded = q.bfloat16().double()
    expected = (rounded @ rounded.mT / WIDTH**0.5).softmax(-1)
    assert half_complaint(weights, expected, [], torch.bfloat16) is None
    assert half_complaint(output, expected @ rounded, [], torch.bfloat16) is None
    assert output.dtype == weights.dtype == torch.bfloat16


def test_an_implementation_without_weights_says_so() -> None:
    q = torch.randn(2, HEADS, LENGTH, WIDTH)
    for impl in ("fused", "tiled"):
        module = ScaledDotProductAttention(WIDTH, impl=impl)
        assert module(q, q, q).shape == q.shape
        with pytest.raises(UnsupportedError, match="never holds the weights"):
            module(q, q, q, need_weights=True)
