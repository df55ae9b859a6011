"""params-single: the parameters of the three projections of one head."""

from __future__ import annotations

from torch import nn

from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import exact
from sqrtdk.lab.text import Text
from sqrtdk.nn import MultiHeadAttention

OUTPUT = "out_proj"


def measure(run: Run) -> Measured:
    """Parameters of the projections of q, k and v in real modules, over 3 d_model d_k."""
    figures = []
    for d_model, d_k in run["sizes"]:
        place = {"d_model": d_model, "d_k": d_k}
        formula = 3 * d_model * d_k
        for module, count in _counts(d_model, d_k, run["bias"]).items():
            figures += [
                exact("parameters", count, module=module, **place),
                exact("parameters_over_formula", count / formula, module=module, **place),
            ]
    return Measured(figures)


def _counts(d_model: int, d_k: int, bias: bool) -> dict[str, int]:
    layers = nn.ModuleList(nn.Linear(d_model, d_k, bias=bias, device="meta") for _ in range(3))
    head = MultiHeadAttention(d_model, 1, bias=bias, head_dim=d_k, device="meta")
    modules = {"torch Linear": layers, "sqrtdk MultiHeadAttention": head}
    return {
        name: sum(p.numel() for path, p in module.named_parameters() if not path.startswith(OUTPUT))
        for name, module in modules.items()
    }


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    one = figures.all("parameters")[0]
    d_model, d_k = int(one.at["d_model"]), int(one.at["d_k"])
    return Text(
        f"Each of the three matrices maps d_model channels to d_k: at d_model = {d_model}, d_k = {d_k} the modules "
        "hold "
        f"{one.value:.0f} = 3 x {d_model} x {d_k} parameters. The formula is for d_v = d_k and without biases. "
        f"torch's Linear has a bias by default, which adds 3 d_k = {3 * d_k}. The scale 1/sqrt(d_k) has none.",
        f"三个矩阵各把 d_model 个通道映射为 d_k 个：d_model = {d_model}、d_k = {d_k} 时，模块共有 "
        f"{one.value:.0f} = 3 x {d_model} x {d_k} 个参数。公式适用于 d_v = d_k 且没有偏置的情形。"
        f"torch 的 Linear 默认带偏置，会多出 3 d_k = {3 * d_k} 个参数。缩放因子 1/sqrt(d_k) 本身没有参数。",
    )


CLAIM = Claim(
    id="params-single",
    group="structure",
    sources=("S4",),
    statement=Text(
        "W_Q, W_K and W_V of one head hold 3 d_model d_k parameters.",
        "单个头的 W_Q、W_K、W_V 共有 3 d_model d_k 个参数。",
    ),
    formula=r"|W_Q| + |W_K| + |W_V| = 3\,d_{model}\,d_k",
    method=Text(
        "Count the parameters of real modules without biases, for several sizes: three layers of torch, and the "
        "projections of the multi-head module with one head.",
        "对若干尺寸，统计不带偏置的真实模块的参数个数：torch 的三个线性层，以及只有一个头的多头注意力模块中的投影。",
    ),
    control=Text("The same modules with biases: 3 d_k more.", "同样的模块带上偏置：多出 3 d_k 个参数。"),
    parameters={"sizes": ((512, 64), (768, 64), (512, 512), (4096, 128)), "bias": False},
    quick={},
    flipped={"bias": True},
    measure=measure,
    parts=(
        Part(
            Text("the number is 3 d_model d_k, exactly", "个数恰好为 3 d_model d_k"),
            (Expect("parameters_over_formula", low=1.0, high=1.0),),
        ),
    ),
    why=why,
)
