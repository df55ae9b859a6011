"""heads-differ: the heads of an attention attend to different positions or subspaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqrtdk.lab._arms import train_arms
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text

APART, SHARED = 0.1, 0.5
STATES = {"start": "before training", "end": "after training"}


def measure(run: Run) -> Measured:
    """Divergence of the weights and overlap of the subspaces, over all pairs of heads, before and after training."""
    sizes = {"head_dim": run["head_dim"], "heads": run["heads"], "layers": run["layers"], "width": run["width"]}
    arm = train_arms(run, {"model": {"task": "text", "tied": run["tied"], **sizes}})["model"]
    models = [result["heads"] for result in arm.runs]
    figures = []
    for layer in range(run["layers"]):
        diverged, shared = {}, {}
        for state in STATES:
            pairs = [[pair for pair in model[state] if pair["layer"] == layer] for model in models]
            diverged[state], shared[state] = _means(pairs, "divergence"), _means(pairs, "query_overlap", "key_overlap")
            figures.append(mean("divergence", diverged[state], layer=layer, state=state))
            figures.append(mean("subspace_overlap", shared[state], layer=layer, state=state))
        for name, of in (("divergence_gained", diverged), ("subspace_overlap_gained", shared)):
            gained = [end - start for end, start in zip(of["end"], of["start"], strict=True)]
            figures.append(mean(name, gained, layer=layer))
    return Measured(figures, (_plot(Figures(figures), run["head_dim"] / run["width"]),))


def _means(models: Sequence[Sequence[Mapping[str, float]]], *names: str) -> list[float]:
    """For each model the mean over its pairs of heads and the names."""
    return [sum(pair[name] for pair in pairs for name in names) / (len(pairs) * len(names)) for pairs in models]


def _plot(figures: Figures, chance: float) -> Plot:
    return Plot(
        "heads",
        Text(
            "Divergence of the weights of two heads, and overlap of the subspaces that they read, by layer.",
            "两个头的权重之间的散度，以及它们所读取的子空间的重叠，按层。",
        ),
        "layer",
        "0: none, 1: complete",
        tuple(
            over(f"{name}, {when}", figures.all(entry, state=state), "layer", style="bars")
            for name, entry in (("divergence", "divergence"), ("overlap", "subspace_overlap"))
            for state, when in STATES.items()
        ),
        lines=(("overlap of random subspaces", chance),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    first, last = (figures("divergence", layer=0, state=state) for state in STATES)
    shared, gained = figures("subspace_overlap", layer=0, state="end"), figures("subspace_overlap_gained", layer=0)
    return Text(
        f"In the first layer the weights of two heads diverge by {last} of a possible 1 after training, and by {first} "
        "before it: heads that start with random weights already look at different positions, and training drives "
        "them further apart, as a second head with the map of the first would add little. Subspaces are another "
        f"matter. Those that two heads read overlap by {shared}, and training changes that by {gained} only: they "
        "differ because random subspaces of d_k among d_model dimensions overlap by d_k / d_model on average, not "
        "because training pulls them apart.",
        f"在第一层，训练后两个头的权重之间的散度为 {last}（最大为 1），训练前为 {first}："
        "随机初始化的各头本来就关注不同的位置，训练又使它们进一步分开，因为与另一个头完全相同的头没有多少用处。"
        f"子空间则不同：两个头所读取的子空间的重叠为 {shared}，训练只使它改变 {gained}。"
        "它们不同，是因为 d_model 维中的随机 d_k 维子空间平均只重叠 d_k / d_model，而不是训练把它们拉开的。",
    )


CLAIM = Claim(
    id="heads-differ",
    group="structure",
    sources=("S4",),
    statement=Text(
        "Different heads of a multi-head attention attend to different positions or subspaces.",
        "多头注意力的不同头关注不同的位置或子空间。",
    ),
    formula=r"\mathrm{JSD}(p, p') = \frac{H(\frac{p + p'}{2}) - \frac{1}{2} H(p) - \frac{1}{2} H(p')}{\log 2}, \qquad "
    r"\mathrm{overlap} = \frac{1}{d_k} \sum_{i=1}^{d_k} \cos^2 \theta_i",
    method=Text(
        "Train byte decoders of several heads on Python's standard library from several seeds. Positions: the "
        "Jensen-Shannon divergence of the weights of two heads in the same row of held-out text, 0 for equal weights "
        "and 1 for weights that share no key; it must reach 0.1 and exceed that of the same model before training. "
        "Subspaces: the mean squared cosine of the principal angles between the row spaces of the heads' W_q and of "
        "their W_k, 1 for equal subspaces; it must stay below 1/2.",
        "用 Python 标准库的文本训练若干个多头字节级解码器，使用多个种子。位置：在留出文本的同一行上，"
        "计算两个头的权重之间的 Jensen-Shannon 散度，相等时为 0，没有共同的键时为 1；"
        "它必须达到 0.1，并且大于同一模型训练前的值。子空间：各头 W_q（以及 W_k）行空间之间主角余弦平方的平均值，"
        "子空间相同时为 1；它必须低于 1/2。",
    ),
    control=Text(
        "All heads of a layer share their weights of q and k, from the start and through training.",
        "同一层的所有头从初始化到训练结束都共享 q 与 k 的权重。",
    ),
    parameters={
        "heads": 4,
        "head_dim": 16,
        "layers": 2,
        "width": 64,
        "tied": False,
        "seeds": 4,
        "rates": (3e-3,),
        "widened": 0,
        "text": {"steps": 400, "rows": 16, "length": 64, "points": 0},
    },
    quick={"layers": 1, "text": {"steps": 70, "rows": 16, "length": 64, "points": 0}},
    flipped={"tied": True},
    measure=measure,
    parts=(
        Part(
            Text("heads attend to different positions", "不同的头关注不同的位置"),
            (Expect("divergence", low=APART, at={"state": "end"}), Expect("divergence_gained", low=0.0)),
        ),
        Part(
            Text("heads read different subspaces", "不同的头读取不同的子空间"),
            (Expect("subspace_overlap", high=SHARED, at={"state": "end"}),),
        ),
    ),
    why=why,
)
