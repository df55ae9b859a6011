"""Operations between projection and product, or on the logits, that no table of the trace lists."""

from __future__ import annotations

from collections.abc import Callable

import einops
import torch
from torch import Tensor, nn
from torch.nn import functional as F

B, H, L, E = 2, 4, 6, 8
WIDTH, ROOT = H * E, E**-0.5
Middle = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
Vectors = Callable[[Tensor], Tensor]

CHANNELS = torch.randperm(E, generator=torch.Generator().manual_seed(0))
ROWS = torch.randperm(L, generator=torch.Generator().manual_seed(1))


@torch.library.custom_op("sqrtdk_asked::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """A kernel that doubles."""
    return x * 2


@torch.library.custom_op("sqrtdk_asked::backwards", mutates_args=())
def backwards(x: Tensor) -> Tensor:
    """A kernel that turns channels round."""
    return x.flip(-1).contiguous()


@torch.library.custom_op("sqrtdk_asked::unit_rows", mutates_args=())
def unit_rows(x: Tensor) -> Tensor:
    """A kernel that normalises."""
    return F.rms_norm(x, x.shape[-1:])


for _kernel in (twice, backwards, unit_rows):
    _kernel.register_fake(torch.empty_like)


class Doubles(torch.autograd.Function):
    """Times two, with a gradient of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * ROOT).softmax(-1) @ v


def on_both(function: Vectors) -> Middle:
    return lambda _, q, k, v: attend(function(q), function(k), v)


def on_logits(function: Vectors) -> Middle:
    return lambda _, q, k, v: function(q @ k.mT * ROOT).softmax(-1) @ v


def on_values(function: Vectors) -> Middle:
    return lambda _, q, k, v: attend(q, k, function(v))


def on_weights(function: Vectors) -> Middle:
    return lambda _, q, k, v: function((q @ k.mT * ROOT).softmax(-1)) @ v


def rearranged(*patterns: str, **sizes: int) -> Middle:
    def function(x: Tensor) -> Tensor:
        for pattern in patterns:
            names = pattern.partition("->")[0]
            x = einops.rearrange(
                x, pattern, **{n: size for n, size in (sizes | {"h": H, "b": B}).items() if n in names}
            )
        return x

    return on_both(function)


def zeros_with(write: Callable[[Tensor, Tensor], Tensor]) -> Middle:
    return on_both(lambda x: write(torch.zeros_like(x), x))


def on_q(function: Vectors) -> Middle:
    return lambda _, q, k, v: attend(function(q), k, v)


def halves_in_turn(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def doubled_far_out(x: Tensor) -> Tensor:
    x = x.clone()
    x[x < -8] = 2 * x[x < -8]
    return x


def cut_far_out(x: Tensor) -> Tensor:
    x = x.clone()
    x[x < -8] = 0.0
    return x


def in_pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def complex_product(part: Vectors, *, conjugate: bool = True) -> Middle:
    def middle(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = in_pairs(q) @ (in_pairs(k).conj() if conjugate else in_pairs(k)).mT
        return (part(z) * ROOT).softmax(-1) @ v

    return middle


def by_exponentials(z: Tensor) -> Tensor:
    """As JAX has it: the sum in float32, and cast down before the division."""
    e = torch.exp(z - z.amax(-1, keepdim=True))
    return e / e.float().sum(-1, keepdim=True).to(e.dtype)


def by_reciprocals(z: Tensor) -> Tensor:
    e = torch.exp(z - z.amax(-1, keepdim=True))
    return e * (1 / e.float().sum(-1, keepdim=True)).to(e.dtype)


def few_queries(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ProbSparse attention (Zhou et al. 2021, arXiv:2012.07436): of the other rows none attends."""
    sampled = (q @ k[:, :, ::2].mT).amax(-1) - (q @ k[:, :, ::2].mT).mean(-1)
    b, h = torch.arange(len(q))[:, None, None], torch.arange(H)[:, None]
    out = v.mean(-2, keepdim=True).expand_as(v).clone()
    out[b, h, sampled.topk(3).indices] = attend(q[b, h, sampled.topk(3).indices], k, v)
    return out


OUTSIDE = torch.randn(E, E, generator=torch.Generator().manual_seed(2))
OUTSIDE_DIAGONAL, OUTSIDE_ORDER = 2 * torch.eye(E), torch.eye(E)[CHANNELS]
FROM_OUTSIDE = "a matrix from outside the model"

# Name -> what happens between projections and output, and the scale that it has.
READ: dict[str, tuple[Middle, float]] = {
    "roll of channels": (on_both(lambda x: x.roll(1, -1)), ROOT),
    "roll of positions": (on_both(lambda x: x.roll(1, -2)), ROOT),
    "roll of k and v": (lambda _, q, k, v: attend(q, k.roll(1, -2), v.roll(1, -2)), ROOT),
    "flip": (on_both(lambda x: x.flip(-1)), ROOT),
    "rot90 twice": (on_both(lambda x: x.rot90(1, (-2, -1)).rot90(-1, (-2, -1))), ROOT),
    "index": (on_both(lambda x: x[..., CHANNELS]), ROOT),
    "index_select": (on_both(lambda x: x.index_select(-1, CHANNELS)), ROOT),
    "gather": (on_both(lambda x: x.gather(-1, CHANNELS.expand_as(x))), ROOT),
    "take_along_dim": (on_both(lambda x: x.take_along_dim(CHANNELS.expand_as(x), -1)), ROOT),
    "rows of k and v by indices": (lambda _, q, k, v: attend(q, k[:, :, ROWS], v[:, :, ROWS]), ROOT),
    "scatter": (zeros_with(lambda zero, x: zero.scatter(-1, CHANNELS.expand_as(x), x)), ROOT),
    "index_copy": (zeros_with(lambda zero, x: zero.index_copy(-1, CHANNELS, x)), ROOT),
    "index_add": (zeros_with(lambda zero, x: zero.index_add(-1, CHANNELS, x)), ROOT),
    "masked_scatter": (zeros_with(lambda zero, x: zero.masked_scatter(zero == 0, x)), ROOT),
    "put": (zeros_with(lambda zero, x: zero.put(torch.arange(x.numel()).flip(0), x)), ROOT),
    "Fourier transform and back": (on_both(lambda x: torch.fft.ifft(torch.fft.fft(x)).real), ROOT),
    "real Fourier transform and back": (on_both(lambda x: torch.fft.irfft(torch.fft.rfft(x), n=E)), ROOT),
    "sums and their differences": (on_both(lambda x: F.pad(x, (1, 0)).cumsum(-1).diff(dim=-1)), ROOT),
    "unfold": (on_both(lambda x: x.unfold(-1, E, 1).squeeze(-2)), ROOT),
    "channel_shuffle": (on_both(lambda x: F.channel_shuffle(x.reshape(-1, E, 1, 1), 2).reshape(x.shape)), ROOT),
    "pixel_shuffle": (on_both(lambda x: F.pixel_shuffle(x.reshape(-1, 4, 1, 1), 2).reshape(x.shape)), ROOT),
    "as_strided": (on_both(lambda x: x.contiguous().as_strided(x.shape, (H * L * E, L * E, E, 1))), ROOT),
    "where": (on_both(lambda x: torch.where(x == x, x, 0.0)), ROOT),
    "nan_to_num": (on_both(torch.nan_to_num), ROOT),
    "float64 and back": (on_both(lambda x: x.double().float()), ROOT),
    "lerp": (on_both(lambda x: torch.lerp(torch.zeros_like(x), x, 0.5)), ROOT / 4),
    "lerp of k": (lambda _, q, k, v: attend(q, torch.lerp(torch.zeros_like(k), k, 2.0), v), 2 * ROOT),
    "addcdiv": (zeros_with(lambda zero, x: torch.addcdiv(zero, x, torch.full_like(x, 0.5))), 4 * ROOT),
    "ldexp": (on_both(lambda x: torch.ldexp(x, torch.tensor(1))), 4 * ROOT),
    "diagonal matrix": (on_both(lambda x: torch.einsum("bhle,ef->bhlf", x, 2 * torch.eye(E))), 4 * ROOT),
    "Kronecker product": (on_both(lambda x: x @ torch.kron(torch.eye(2), torch.eye(4))), ROOT),
    "autograd function": (on_both(Doubles.apply), 4 * ROOT),
    "kernel that doubles": (on_both(twice), 4 * ROOT),
    "kernel that turns round": (on_both(backwards), ROOT),
    "kernel that normalises": (on_both(unit_rows), ROOT),
    "vmap of a factor": (on_both(torch.vmap(lambda x: x * 2)), 4 * ROOT),
    "vmap of the product": (
        lambda _, q, k, v: (torch.vmap(torch.vmap(lambda a, b: a @ b.T))(q, k) * ROOT).softmax(-1) @ v, ROOT,
    ),
    "length by einsum": (on_both(lambda x: x * torch.einsum("bhle,bhle->bhl", x, x).div(E).rsqrt()[..., None]), ROOT),
    "length by logarithms": (on_both(lambda x: x / torch.exp(0.5 * x.square().mean(-1, keepdim=True).log())), ROOT),
    "length by vecdot": (on_both(lambda x: x / torch.linalg.vecdot(x, x).div(E).sqrt()[..., None]), ROOT),
    "flip and flip of logits": (on_logits(lambda z: z.flip(-1).flip(-1)), ROOT),
    "where on logits": (on_logits(lambda z: torch.where(z == z, z, z.square())), ROOT),
    "kernel on logits": (on_logits(twice), 2 * ROOT),
    "autograd function on logits": (on_logits(Doubles.apply), 2 * ROOT),
    "lerp on logits": (on_logits(lambda z: torch.lerp(torch.zeros(()), z, 0.5)), ROOT / 2),
    "ldexp on logits": (on_logits(lambda z: torch.ldexp(z, torch.tensor(1))), 2 * ROOT),
    "logits and v reordered": (lambda _, q, k, v: (q @ k.mT * ROOT)[..., ROWS].softmax(-1) @ v[..., ROWS, :], ROOT),
    "hardtanh of v": (on_values(F.hardtanh), ROOT),
    "roll of v": (on_values(lambda v: v.roll(1, -1)), ROOT),
    "weights and the identity": (on_weights(lambda p: p + torch.eye(L)), ROOT),
    "weights less their mean": (on_weights(lambda p: p - 1 / L), ROOT),
    "weights mixed with an adjacency": (on_weights(lambda p: 0.5 * p + 0.5 * torch.eye(L).roll(1, 0)), ROOT),
    "flip of weights and v": (lambda _, q, k, v: (q @ k.mT * ROOT).softmax(-1).flip(-1) @ v.flip(-2), ROOT),
    "heads together and apart": (rearranged("b h l e -> b l (h e)", "b l (h e) -> b h l e"), ROOT),
    "heads in the batch": (rearranged("b h l e -> (b h) l e", "(b h) l e -> b h l e"), ROOT),
    "pairs of channels as an axis": (rearranged("b h l (p e) -> b h p l e", "b h p l e -> b h l (p e)", p=2), ROOT),
    "pairs of channels the other way": (rearranged("b h l (p e) -> b h l (e p)", p=2), ROOT),
    "axes reversed": (rearranged("b h l e -> e l h b", "e l h b -> b h l e"), ROOT),
    "halves of positions": (rearranged("b h (s l) e -> s b h l e", "s b h l e -> b h (s l) e", s=2), ROOT),
    "channels of q and k in turn": (on_both(halves_in_turn), ROOT),
    "real part of a complex product": (complex_product(lambda z: z.real), ROOT),
    "first of real and imaginary part": (complex_product(lambda z: torch.view_as_real(z)[..., 0]), ROOT),
    "complex numbers multiplied and summed": (
        lambda _, q, k, v: ((in_pairs(q)[:, :, :, None] * in_pairs(k).conj()[:, :, None]).sum(-1).real * ROOT)
        .softmax(-1) @ v, ROOT,
    ),
    "weights by a sum that was cast": (
        lambda _, q, k, v: by_exponentials(q @ k.mT * ROOT).to(v.dtype) @ v, ROOT,
    ),
    "weights by a reciprocal": (lambda _, q, k, v: by_reciprocals(q @ k.mT * ROOT).to(v.dtype) @ v, ROOT),
    "diagonal matrix from outside": (on_q(lambda x: x @ OUTSIDE_DIAGONAL), 2 * ROOT),
    "permutation matrix from outside": (on_both(lambda x: x @ OUTSIDE_ORDER), ROOT),
    "three axes of channels": (rearranged("b h l (x y z) -> b h l (z y x)", x=2, y=2), ROOT),
}  # fmt: skip

# Name -> what happens, and the operation that is named: what it does is no factor, so that there is no scale.
UNREAD: dict[str, tuple[Middle, str]] = {
    "tanh of q": (lambda _, q, k, v: attend(q.tanh(), k, v), "tanh"),
    "relu": (on_both(F.relu), "relu"),
    "elu": (on_both(lambda x: F.elu(x) + 1), "elu"),
    "softplus": (on_both(F.softplus), "softplus"),
    "signed root": (on_both(lambda x: x.sign() * x.abs().sqrt()), "mul"),
    "long rows cut off": (on_both(lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=50.0)), "div"),
    "relu of logits": (on_logits(F.relu), "relu"),
    "root of logits": (on_logits(lambda z: z.abs().sqrt()), "sqrt"),
    "asinh of logits": (on_logits(torch.asinh), "asinh"),
    "curve below -8": (on_both(lambda x: torch.where(x > -8, x, 2 * x + 8)), "where"),
    "curve of q below -8": (on_q(lambda x: torch.where(x > -8, x, 2 * x + 8)), "where"),
    "curve of logits below -8": (on_logits(lambda z: torch.where(z > -8, z, 2 * z + 8)), "where"),
    "halved where any is large": (on_both(lambda x: torch.where((x > 50).any(), x / 2, x)), "where"),
    "halved where rows are long": (
        on_both(lambda x: torch.where(x.norm(dim=-1, keepdim=True) > 50, x / 2, x)),
        "where",
    ),
    "halved by the largest": (on_both(lambda x: x * torch.where(x.amax() > 50, 0.5, 1.0)), "mul"),
    "logits halved where one is large": (
        on_logits(lambda z: torch.where(z.abs().amax(-1, keepdim=True) > 50, z / 2, z)),
        "where",
    ),
    "logits halved by the largest": (on_logits(lambda z: z * torch.where(z.amax() > 50, 0.5, 1.0)), "mul"),
    "0 below -8": (on_both(lambda x: x * (x > -8)), "mul"),
    "0 written below -8": (on_both(cut_far_out), "index_put"),
    "doubled below -8": (on_both(doubled_far_out), "index_put"),
    "imaginary part": (complex_product(lambda z: z.imag), "complex product"),
    "length of a complex product": (complex_product(torch.abs), "complex product"),
    "less the largest of the heads": (
        on_logits(lambda z: z - z.amax(1, keepdim=True)),
        "a sum with a function of the logits",
    ),
    "logits over their deviation": (on_logits(lambda z: z / z.std()), "div by a function of the logits"),
    "logits over that of others": (
        lambda _, q, k, v: ((q @ k.mT) / (q @ k.mT).std()).softmax(-1) @ v,
        "div by a function of the logits",
    ),
    "exponentials over the sum of the heads": (
        lambda _, q, k, v: (lambda e: (e / e.sum(1, keepdim=True)) @ v)(torch.exp(q @ k.mT * ROOT)),
        "softmax over another axis than the value product sums over",
    ),
    "exponentials over the sum of all": (
        lambda _, q, k, v: (lambda e: (e / e.sum()) @ v)(torch.exp(q @ k.mT * ROOT)),
        "division by a sum over several axes",
    ),
    "few queries": (few_queries, "queries picked by their values"),
    "matrix from outside on q": (on_q(lambda x: x @ OUTSIDE), FROM_OUTSIDE),
    "matrix from outside on k": (lambda _, q, k, v: attend(q, F.linear(k, OUTSIDE), v), FROM_OUTSIDE),
    "matrix from outside on both": (on_both(lambda x: torch.einsum("bhle,ef->bhlf", x, OUTSIDE)), FROM_OUTSIDE),
    "squared weights": (on_weights(torch.square), "pow on the weights"),
}

# Name -> what moves channels of q or k alone: the product is one of channels that don't belong together.
PERMUTED: dict[str, Middle] = {
    "halves of q in turn": on_q(halves_in_turn),
    "flip of q": on_q(lambda x: x.flip(-1)),
    "roll of q": on_q(lambda x: x.roll(1, -1)),
    "kernel that turns q round": on_q(backwards),
    "k by indices": lambda _, q, k, v: attend(q, k[..., CHANNELS], v),
    "k by a gather": lambda _, q, k, v: attend(q, k.gather(-1, CHANNELS.expand_as(k)), v),
    "halves of q changed places": on_q(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)),
    "heads of q across": lambda _, q, k, v: attend(
        q.transpose(1, 2).flatten(2).unflatten(-1, (E, H)).permute(0, 3, 1, 2), k, v
    ),
    "heads of q in another order": on_q(lambda x: x.roll(1, 1)),
    "heads of k in another order": lambda _, q, k, v: attend(q, k.flip(1), v),
    "permutation matrix on k": lambda _, q, k, v: attend(q, k @ OUTSIDE_ORDER, v),
    "q one way and k another": lambda _, q, k, v: attend(q.flip(-1), k.roll(1, -1), v),
    "kernel of attention with halves of q in turn": lambda _, q, k, v: F.scaled_dot_product_attention(
        halves_in_turn(q), k, v
    ),
    "complex product without a conjugate": complex_product(lambda z: z.real, conjugate=False),
}


class Asked(nn.Module):
    """Self-attention of four heads with one of these in its middle."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, E)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.middle(self, q, k, v).transpose(1, 2).flatten(2)
