"""MultiHeadAttention beside torch.nn.MultiheadAttention, and TransformerBlock beside torch's encoder layer."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.nn import MultiHeadAttention, TransformerBlock
from tests.tolerances import HALF, complaint, gradient_complaints, half_complaint

D, H, N, L, S = 12, 3, 2, 5, 4
INNER = 20  # of the block's network
SIZES = {"self": {}, "cross": {}, "kdim": {"kdim": 7}, "vdim": {"vdim": 5}, "both": {"kdim": 7, "vdim": 5}}
LAYOUTS = ("batch_first", "length_first", "unbatched")
MASKS = ("none", "bool", "bool heads", "float", "float heads", "padding", "float padding", "bool both", "float both")
APPENDED = list(itertools.product((False, True), repeat=2))
BIASES = (True, False)
WEIGHTS = ("none", "mean", "heads")


def inputs(kind: str, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    options = SIZES[kind]
    keys = L if kind == "self" else S
    shapes = [(N, L, D), (N, keys, options.get("kdim", D)), (N, keys, options.get("vdim", D))]
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    if layout == "length_first":
        made = [x.transpose(0, 1).contiguous() for x in made]
    if layout == "unbatched":
        made = [x[0] for x in made]
    made = [x.requires_grad_() for x in made]
    return (made[0],) * 3 if kind == "self" else (made[0], made[1], made[2])


def masks(name: str, layout: str, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """attn_mask and key_padding_mask; every row sees key 0."""
    batch = 1 if layout == "unbatched" else N
    shape = (batch * H, L, keys) if "heads" in name or "both" in name else (L, keys)
    seen, real = torch.rand(shape) < 0.6, torch.rand(batch, keys) < 0.6
    seen[..., 0], real[..., 0] = True, True
    attn = padding = None
    if name.startswith("bool"):
        attn = ~seen
    if name in ("float", "float heads", "float both"):
        attn = torch.randn(shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    if name in ("padding", "bool both"):
        padding = ~real
    if name in ("float padding", "float both"):
        padding = torch.randn(batch, keys, dtype=torch.float64).masked_fill(~real, -torch.inf)
    if padding is not None and layout == "unbatched":
        padding = padding[0]
    return attn, padding


def results(
    module: nn.Module, tensors: tuple[Tensor, ...], weights: str, attn: Tensor | None, padding: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output and weights; the gradients of all inputs and parameters."""
    output, found = module(
        *tensors,
        key_padding_mask=padding,
        need_weights=weights != "none",
        attn_mask=attn,
        average_attn_weights=weights != "heads",
    )
    named = {"output": output} | ({} if found is None else {"weights": found})
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, dtype=torch.float64, generator=generator)).sum() for x in named.values())
    leaves = {f"input {i}": x for i, x in enumerate(dict.fromkeys(tensors))} | dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(leaves.values()))  # type: ignore[arg-type]
    return named, dict(zip(leaves, gradients, strict=True))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SIZES)
def test_outputs_weights_and_gradients_are_torchs(kind: str, layout: str, mask: str) -> None:
    for bias, (bias_kv, zero), weights in itertools.product(BIASES, APPENDED, WEIGHTS):
        options = {"bias": bias, "add_bias_kv": bias_kv, "add_zero_attn": zero, "batch_first": layout == "batch_first"}
        options |= SIZES[kind] | {"dtype": torch.float64}
        theirs = nn.MultiheadAttention(D, H, **options)
        ours = MultiHeadAttention(D, H, **options)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.normal_()
        ours.load_state_dict(theirs.state_dict())
        tensors = inputs(kind, layout)
        attn, padding = masks(mask, layout, L if kind == "self" else S)
        expected = results(theirs, tensors, weights, attn, padding)
        actual = results(ours, tensors, weights, attn, padding)
        assert actual[0].keys() == expected[0].keys()
        for name, value in expected[0].items():
            found = complaint(actual[0][name], value, torch.float64, length=D, logit=100.0)
            assert found is None, f"{name}, {options}, weights {weights}: {found}"
        wrong = gradient_complaints(actual[1], expected[1], torch.float64, length=D, logit=100.0, rows=N * H * L)
        assert not wrong, f"{options}, weights {weights}: {wrong}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_as_good_as_torchs(dtype: torch.dtype) -> None:
    theirs = nn.MultiheadAttention(64, 4, batch_first=True, dtype=dtype)
    ours = MultiHeadAttention(64, 4, batch_first=True, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 32, 64).to(dtype)
    expected = MultiHeadAttention(64, 4, batch_first=True, dtype=torch.float64)
    expected.load_state_dict(theirs.state_dict())
    truth, beside, actual = (module(*[x.to(to)] * 3)[0].detach() for module, to in _each(expected, theirs, ours, dtype))
    if dtype in HALF:
        assert half_complaint(actual, truth, [beside], dtype) is None
    else:
        assert complaint(actual, truth, dtype, length=64, logit=4.0) is None


def _each(expected: nn.Module, theirs: nn.Module, ours: nn.Module, dtype: torch.dtype) -> list:  # type: ignore[type-arg]
    return [(expected, torch.float64), (theirs, dtype), (ours, dtype)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("bias_kv", [False, True])
@pytest.mark.parametrize("bias", BIASES)
def test_state_dicts_fit_both_ways(kind: str, bias: bool, bias_kv: bool) -> None:
    options = {"bias": bias, "add_bias_kv": bias_kv} | SIZES[kind]
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(D, H, **options)
    torch.manual_seed(5)
    ours = MultiHeadAttention(D, H, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), f"{name}: one seed gives both the same start"
    fresh = MultiHeadAttention(D, H, **options)
    theirs.load_state_dict(fresh.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for name, value in fresh.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_block_is_torchs_encoder_layer(layout: str, bias: bool, norm_first: bool, activation: str) -> None:
    options = {"activation": activation, "norm_first": norm_first, "bias": bias, "batch_first": layout == "batch_first"}
    theirs = nn.TransformerEncoderLayer(D, H, INNER, **options, dtype=torch.float64).train()
    ours = TransformerBlock(D, H, INNER, **options, dtype=torch.float64).train()
    for module in (*theirs.modules(), *ours.modules()):  # train mode keeps torch off its fused path
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention | MultiHeadAttention):
            module.dropout = 0.0
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    x = inputs("self", layout)[0]
    attn, padding = masks("bool both", layout, L)
    expected, actual = theirs(x, attn, padding), ours(x, attn, padding)
    assert complaint(actual, expected, torch.float64, length=INNER, logit=200.0) is None
    probe = torch.randn_like(expected)
    found, wanted = (
        dict(zip(leaves, torch.autograd.grad((y * probe).sum(), list(leaves.values())), strict=True))
        for y, leaves in ((y, {"x": x} | dict(m.named_parameters())) for y, m in ((actual, ours), (expected, theirs)))
    )
    wrong = gradient_complaints(found, wanted, torch.float64, length=INNER, logit=200.0, rows=N * H * L)
    assert not wrong, wrong
