"""Records of what check, check on inputs, and diff say of graphs: the net under changes of how graphs are read.

A record holds formulas, sites, places, verdicts, findings, notes and errors, without figures that differ from CPU to
CPU. `python -m tests.graphs.records` writes all of them anew, `python -m tests.graphs.records WORD` those with the word
in their names.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sqrtdk
from sqrtdk.audit.records import CheckReport
from sqrtdk.compare.records import DiffReport
from sqrtdk.errors import SqrtdkError
from sqrtdk.laws import table
from tests.graphs.files import L, attention_model, onnx, write

FILE = Path(__file__).parent / "golden" / "records.json"
make = onnx.helper.make_node
X = {"x": torch.linspace(-1, 1, 2 * L * 8).sin().reshape(2, L, 8)}
_NUMBER = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
Case = Callable[[Path], Any]


# -- what is recorded --------------------------------------------------------------------------------------------------


def _text(text: Any, folder: Path) -> Any:
    """Text without folders of this machine, and with figures to two digits."""
    if text is None:
        return None
    plain = re.sub(r"/[^\s:\"']*/(site-packages|tests)/", "", str(text).replace(f"{folder}/", ""))
    return _NUMBER.sub(lambda number: f"{float(number[0]):.1e}", plain)


def checked(report: CheckReport, folder: Path) -> dict[str, Any]:
    """Calls, findings, notes and what is not measured, of a check."""
    calls = [
        {
            "site": one.call.site, "formula": one.call.formula, "kind": f"{one.call.kind} {one.call.op}",
            "verdict": f"{one.verdict} {one.mistake} {one.health}", "by": _text(one.declared_by, folder),
            "reason": _text(one.reason, folder), "at": _text(one.call.softmax_at, folder),
            "product": _text(one.call.product_at, folder), "class": one.call.module_class,
            "stats": one.call.stats is not None, "no stats": _text(one.call.stats_reason, folder),
        }
        for one in report.calls
    ]  # fmt: skip
    return {
        "calls": calls,
        "findings": [[f.rule, f.severity, f.site, _text(f.message, folder)] for f in report.findings],
        "not measured": [[e.site, _text(e.reason, folder), _text(e.at, folder)] for e in report.not_measured],
        "not attention": [[e.site, _text(e.reason, folder)] for e in report.not_attention],
        "notes": [_text(note, folder) for note in report.environment["notes"]],
        "model": [_text(report.model.at, folder), report.model.parameters, report.mode, report.outcome],
    }


def compared(report: DiffReport, folder: Path) -> dict[str, Any]:
    """Pairs with causes, and the paragraphs, of a comparison."""
    pairs = [
        [pair.site_a, pair.site_b, pair.same, _text(pair.reason, folder),
         [[cause.name, _text(cause.a, folder), _text(cause.b, folder)] for cause in pair.causes]]
        for pair in report.pairs
    ]  # fmt: skip
    return {
        "pairs": pairs,
        "alone": [[u.site, _text(u.reason, folder)] for u in (*report.unpaired_a, *report.unpaired_b)],
        "outputs": [[one.name, one.same] for one in report.outputs],
        "module": None if report.first_module is None else report.first_module.a,
        "causes": [[c.name, c.site_a, c.site_b, c.proven, _text(c.text, folder)] for c in report.module_causes],
        "exit": report.exit_code,
    }


def said(make: Callable[[Path], Any]) -> Any:
    """The record of a case, or the error that it raises."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as home, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(home)
        try:
            result = make(folder)
        except SqrtdkError as error:
            return {"error": type(error).__name__, "says": _text(error, folder), "hint": _text(error.hint, folder)}
        return checked(result, folder) if isinstance(result, CheckReport) else compared(result, folder)


# -- cases -------------------------------------------------------------------------------------------------------------


def _written(folder: Path, model: Any, given: dict[str, Tensor] | None = None) -> Any:
    path = str(write(model, folder / "m.onnx"))
    if given is None:
        return sqrtdk.check(path, fail_on="unmeasured")
    save_file(given, folder / "x.safetensors")
    return sqrtdk.check(path, input_file=folder / "x.safetensors", fail_on="unmeasured")


def _by_hand(changes: Callable[[], dict[str, Any]], given: dict[str, Tensor] | None = None) -> Case:
    return lambda folder: _written(folder, attention_model(**changes()), given)


def _branch() -> dict[str, Any]:
    shape = onnx.helper.make_tensor_value_info("o", onnx.TensorProto.FLOAT, None)
    inner = [onnx.helper.make_graph([make(op, ["product"], ["o"])], "inner", [], [shape]) for op in ("Identity", "Neg")]
    always = make("Constant", [], ["yes"], value=onnx.numpy_helper.from_array(torch.tensor(True).numpy()))
    return {"logits": [always, make("If", ["yes"], ["z"], "/attn/If", then_branch=inner[0], else_branch=inner[1])]}


def _late(op: str, *others: str, **attributes: Any) -> Callable[[], dict[str, Any]]:
    """An operation between the first attention and what a second one projects."""

    def changes() -> dict[str, Any]:
        nodes = [
            make("Constant", [], ["keep"], value=onnx.numpy_helper.from_array(torch.arange(L).lt(4).numpy())),
            make(op, ["y0", *others], ["odd"], "/mlp/odd", **attributes),
            *(make("MatMul", ["odd", f"w{n}"], [f"{n}2"], f"/late/{n}_proj/MatMul") for n in "qkv"),
            make("Transpose", ["k2"], ["kt2"], perm=[0, 2, 1]),
            make("MatMul", ["q2", "kt2"], ["product2"]),
            make("Mul", ["product2", "scale"], ["scaled2"]),
            make("Softmax", ["scaled2"], ["weights2"], "/late/Softmax"),
            make("MatMul", ["weights2", "v2"], ["y"]),
        ]
        return {"extra": nodes, "last": "y0"}

    return changes


# An operator of ONNX that keeps the shape and that no table of ours has.
UNREAD = "Asinh"
BY_HAND: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "unread on the logits": lambda: {"logits": [make(UNREAD, ["scaled"], ["z"], "/attn/odd")]},
    "unread behind": lambda: {"extra": [make(UNREAD, ["y"], ["far"], "/mlp/odd")]},
    "unread between two": _late(UNREAD),
    "unread of its values": _late("Compress", "keep", axis=1),
    "a branch on the logits": _branch,
}


def _planted(style: str, mistake: str | None, kind: str, *, run: bool = False) -> Case:
    def case(folder: Path) -> Any:
        from tests.graphs import modules

        model, inputs = modules.mistaken(style, mistake, folder)
        path = modules.exported(model, inputs, folder / f"m{kind}")
        if not run:
            return sqrtdk.check(str(path))
        save_file({"x": inputs[0]}, folder / "x.safetensors")
        return sqrtdk.check(str(path), input_file=folder / "x.safetensors")

    return case


def _family(name: str, kind: str) -> Case:
    def case(folder: Path) -> Any:
        from tests.graphs import modules

        model, inputs = modules.family(name, folder)
        return sqrtdk.check(str(modules.exported(model, inputs, folder / f"m{kind}", name)))

    return case


def _eps(model: nn.Module) -> None:
    """A fault outside of attention."""
    for name, module in model.named_modules():
        if name.endswith("post_attention_layernorm"):
            module.variance_epsilon = 0.3


def _activation(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = nn.GELU()


def _head(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name == "lm_head":
            module.register_forward_hook(lambda module, args, out: out.tanh())


def _scale(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "q_proj"):
            module.scaling *= 1.3


FAULTS: dict[str, Callable[[nn.Module], None] | None] = {
    "none": None, "norm eps": _eps, "activation": _activation, "head": _head, "scale": _scale,
}  # fmt: skip


def _diffed(family: str, fault: str, kind: str) -> Case:
    def case(folder: Path) -> Any:
        from tests.compare import test_diff_graphs as graphs

        model, given = graphs.build(family, "eager"), graphs.inputs(family)
        if FAULTS[fault] is not None:
            FAULTS[fault](model)
        return sqrtdk.diff(graphs.build(family, "eager"), graphs.write(model, given, folder / "m", kind), given)

    return case


QUICK: dict[str, Case] = {
    **{f"{name}, static": _by_hand(changes) for name, changes in BY_HAND.items()},
    **{f"{name}, run": _by_hand(changes, X) for name, changes in BY_HAND.items()},
    "planted eager None .pt2": _planted("eager", None, ".pt2"),
}
CASES: dict[str, Case] = {
    **QUICK,
    **{
        f"planted {style} {mistake} {kind}{', run' if run else ''}": _planted(style, mistake, kind, run=run)
        for style, mistake in (("rope", None), ("gqa", "twice"), ("sdpa_scale", "missing"), ("fused_qkv", "model_dim"))
        for kind in (".onnx", ".pt2")
        for run in (False, True)
    },
    **{
        f"family {name} {kind}": _family(name, kind)
        for name, kind in (("llama", ".pt2"), ("bert", ".onnx"), ("gemma2", ".pt2"), ("t5", ".pt2"), ("vit", ".onnx"))
    },
    **{
        f"diff {family}, {fault}, {kind}": _diffed(family, fault, kind)
        for family, fault, kind in (
            *(("llama", fault, kind) for fault in FAULTS for kind in ("script", "program")),
            ("llama", "none", "dynamo"), ("llama", "activation", "dynamo"),
            ("gpt2", "none", "script"), ("gpt2", "none", "program"), ("t5", "none", "program"),
            ("bert", "none", "dynamo"),
        )
    },
}  # fmt: skip


def stored() -> dict[str, Any]:
    """The records of the file."""
    records: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return records


def main(words: list[str]) -> None:
    """Write the records anew."""
    table.DEFAULT = "none"
    records = stored() if words and FILE.exists() else {}
    for name, case in CASES.items():
        if all(word in name for word in words):
            records[name] = json.loads(json.dumps(said(case)))
            print(name, flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(records[name])}" for name in CASES if name in records]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
