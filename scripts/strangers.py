"""Public bug reports that were rebuilt small: `check` and `diff` on each of them, against the answer that is right.

A folder of cases (CASES, default ../shared/cases) holds modules with pairs `broken_X()` and `right_X()`, which return a
module and its inputs, exported files in `files`, and scripts in `interface` and `robust` that show a fault of their
own. A row of REPORTS says what `check` has to say of the broken one, and `diff` of the pair; every right one has to
stay without a finding of its row's kind. Ends with 1 if an answer is wrong that does not wait for something named.
Run: make strangers [CASES=FOLDER]; scripts/strangers.py FOLDER --only TEXT
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

import sqrtdk

Answer = tuple[bool, str]  # whether it is right, and what was said
LEVELS = ("note", "warn", "fail", "critical")
POSITIONS = "positions and masks in words"


@dataclass(frozen=True)
class Report:
    """What is right of one case.

    Attributes:
        name: "file:case".
        check: least severity of a finding of the broken one, "quiet" for none above a note, "" for not asked.
        says: pattern that such a finding's message holds.
        diff: "same", the causes joined by "+" in alphabetical order, "differs" for outputs behind the attentions, ""
            for not asked.
        words: pattern that a paragraph of the comparison holds.
        waits: why a wrong answer is not held against this version.
    """

    name: str
    check: str = ""
    says: str = ""
    diff: str = ""
    words: str = ""
    waits: str = ""


@dataclass(frozen=True)
class Script:
    """A script that shows a fault.

    Attributes:
        name: of its file; "-m sqrtdk" for the program.
        fault: pattern that a line of its output holds while the fault is there.
        shows: pattern that a line holds once it is mended.
        arguments: of the script; `{scratch}` and `{cases}` stand for folders, `{whole}` for the damaged run
            of the cases without its damaged part.
        seconds: after which it is ended.
        paths: folders, from that of the cases, whose modules it imports.
        before: a statement that runs first, where the script knows something by the name that it had.
    """

    name: str
    fault: str
    shows: str
    arguments: tuple[str, ...] = ()
    seconds: float = 600
    paths: tuple[str, ...] = ()
    before: str = ""


REPORTS = (
    Report("masks:cache_alignment", "fail", "own key|upper left", "mask_alignment"),
    Report("masks:cache_rotated_twice", diff="positions", words="cached keys twice"),
    Report("masks:cache_offset_lost", "note", "position", "positions", "from position 0"),
    Report("masks:window_one_more", "fail", "9 keys", "window"),
    Report("masks:window_dropped", "fail", "sliding_window", "window"),
    Report("masks:pad_query_axis", "fail", "on the rows", "padding", "on the rows"),
    Report("masks:pad_inverted", "fail", "inverted", "padding", "inverts"),
    Report("masks:mask_bool_added", "fail", "added", "bias+mask_offset+padding"),
    Report("masks:mask_01_float", "fail", "added", "bias+padding"),
    Report("masks:cross_mask_dropped", "fail", "padding", "padding"),
    Report("masks:joint_text_mask", "warn", "mask", "padding"),
    Report("masks:packed_leak", "fail", "document"),
    Report("masks:packed_leak", diff="mask", words="document boundaries at 10,"),
    Report("masks:static_cache_empty", "warn", "keys", "mask", "keys 10 to 31 on rows 0 to 9"),
    Report("masks:encoder_causal", "fail", "causal", "mask_offset"),
    Report("masks:lm_without_mask", "note", "causal", "mask_offset"),
    Report("masks:fallback_not_causal", diff="mask_offset"),
    Report("masks:softmax_axis", "fail", "over the rows"),
    Report("masks:softmax_over_heads", "fail", "another axis than the keys"),
    Report("masks:batch_first", "fail", "batch", ""),
    Report("masks:pads_see_pads", "quiet", "", "same"),
    Report("masks:left_pad_nan", "critical", "NaN"),
    Report("masks:pad_replaces_causal", diff="mask_offset"),
    Report("masks:attention_mask_unused", "fail", "padding", "padding"),
    Report("rope:rope_mixed_layout", "warn", "not rotated", "rope_layout", "no rotation"),
    Report("rope:rope_layout", diff="rope_layout"),
    Report("rope:rope_partial_ignored", diff="rope_partial"),
    Report("rope:rope_partial_ignored", "fail", "partial_rotary_factor"),
    Report("rope:rope_partial_pairs", diff="rope_partial", words=r"c \+ 8 by base\^\(-2c/16\)"),
    Report("rope:rope_theta_ignored", "fail", "500000", "rope_base"),
    Report("rope:mla_half_rope", diff="rope_partial"),
    Report("rope:left_pad_rotary", "quiet", "", "same"),
    Report("rope:rope_bf16", diff="rounding", words="positions and the frequencies .* bfloat16"),
    Report("rope:rope_2d_swapped", diff="positions", words="swapped"),
    Report("rope:rope_twice_q", "warn", "q is rotated twice", "positions", "q twice, and k once"),
    Report("rest:qk_norm_order", diff="qk_norm_order"),
    Report("rest:qk_norm_axis", diff="qk_norm_axis"),
    Report("rest:qk_norm_skipped", "warn", "never runs", "qk_norm"),
    Report("rest:softcap_after_mask", "fail", "masked keys", "softcap_order"),
    Report("rest:softcap_formula", "warn", "not 3 . tanh", "softcap", "z . tanh"),
    Report("more:softcap_not_passed", "fail", "soft_cap", "softcap"),
    Report("more:softcap_not_passed_hf", "fail", "softcap", "softcap"),
    Report("rest:sink_score_mod", diff="sinks"),
    Report("rest:sink_score_mod", "warn", "one number a head"),
    Report("rest:sink_dropped", diff="sinks"),
    Report("rest:sink_dropped", "warn", "sinks"),
    Report("rest:sink_twice", diff="sinks"),
    Report("rest:sink_scaled", diff="sinks"),
    Report("rest:sink_sigmoid", "quiet", "", "same"),
    Report("rest:dropout_in_eval", "fail", "dropout", "dropout"),
    Report("rest:group_order", diff="group_order"),
    Report("rest:merge_no_transpose", diff="differs"),
    Report("rest:merge_no_transpose", "warn", "merge"),
    Report("rest:qkv_order", diff="head_order"),
    Report("rest:alibi_not_power_of_two", diff="bias"),
    Report("rest:alibi_exponent", diff="bias"),
    Report("rest:kv_fp8_one", diff="rounding"),
    Report("rest:kv_int8_one", "warn", "could not be judged", "rounding"),
    Report("rest:kv_fp8_big", "warn", "", "rounding", "k beyond 448 were cut off"),
    Report("more:fp16_product", "critical", "overflow|65504|float16"),
    Report("more:gpt_oss_flex", diff="sinks", waits="flex attention with sinks needs a GPU"),
    Report("more:softmax_scale_unused", "fail", "0.25", "scale"),
    Report("more:scale_on_q", "quiet", "", "same"),
    Report("fourth.reports.lone:gdn_pad_batch1", "fail", "padding", ""),
    Report("fourth.reports.lone:gdn_pad_batch1", diff="input", words=r"blocks\.0"),
    Report("fourth.reports.lone:gdn_packed", "fail", "document"),
    Report("fourth.reports.lone:gdn_packed", diff="input", words=r"blocks\.0"),
    Report("fourth.reports.lone:rotating_no_evict", "warn", "chunk of 2 tokens", "same"),
    Report("fourth.reports.lone:swin_pad_after_shift", diff="input", words="another order"),
    Report("fourth.reports.lone:mask_5d", "fail", "sample"),
    Report("fourth.reports.lone:mask_5d", diff="mask", words="sample"),
    Report("fourth.reports.lone:flux_mask_order", "warn", "mask", "padding"),
    Report("fourth.reports.lone:fp16_min", "critical", "NaN"),
    Report("fourth.reports.lone:gate_dropped", "warn", "g_proj"),
    Report("fourth.reports.lone:gate_dropped", diff="input", words="gate `g_proj` does not run"),
    Report("fourth.reports.lone:ln_scale_lost", "warn", "exactly 0"),
    Report("fourth.reports.lone:group_attention", "quiet"),
    Report("fourth.reports.port:yarn_factor", "warn", "attention_factor", "length_factor"),
    Report("fourth.reports.port:wo_scale_twice", diff="input", words="0.00367 times"),
    Report("fourth.reports.port:k_bias", "quiet", "", "same"),
    Report("fourth.reports.more:draft_tree", "warn", "changes nothing", "mask"),
)
FILES = {  # a pattern that the reading of the one attention in each holds; it is exact
    "plain.onnx": "37 keys",
    "dynamic_int8.onnx": "37 keys",
    "qdq.onnx": "37 keys",
    "qoperator.onnx": "37 keys",
    "conv_auto_pad.onnx": "64 keys",
    "averagepool.onnx": "16 keys",
    "convtranspose.onnx": "256 keys",
    "maxpool_same.onnx": "64 keys",
    "dotted_constant.onnx": r"0\.3536 \* q\.k",
}
MIXES = (  # what is done to the weights after the softmax
    *("plain", "mix", "mix_nofactor", "gate_convit", "talking", "times_adj", "renorm", "identity", "minus_mean"),
    *("topk", "sub_lambda"),
)
SCRIPTS = (
    Script(
        "interface/causal_bias", r"\b(auto|fused|dense|tiled|cpu) (?!Tensor off by (0\.0e\+00|\d\.\de-0[6-9]))", "cpu"
    ),
    Script("interface/enc_dec_generate", r"^sqrtdk .*\| (?!ok$)", "^sqrtdk train"),
    Script("interface/mask_one_entry", r"^sqrtdk .*Error", "^sqrtdk"),
    Script("interface/mask_one_entry_families", r"sqrtdk b\d \w+: \w*Error", "sqrtdk b2"),
    Script("interface/monkeypatch_recursion", "RecursionError", "mha ok"),
    Script("interface/same_bytes", "Error", "True"),
    Script("interface/shift_labels", "^sqrtdk .*Error", "^sqrtdk output_attentions ok"),
    Script("interface/whisper_and_ignore_index", "^sqrtdk .*Error", "^sqrtdk bert2bert one decoder token ok"),
    Script("robust/watch_many_heads_ends_training", "watch.step raised", "step 40 ", ("{scratch}/run", "2000"), 60),
    Script("robust/trace_small_file_long_time", "^(All|Both|The one) ", "at most .* are computed", ("8192", "1")),
    Script("robust/trace_tensor_over_2GiB", "refused", "4194304 sqrtdk read 1"),
    Script("robust/gguf_unbounded", r"held \d+ MiB", "ModelError"),
    Script(
        "robust/parquet_part_bit_flips",
        "RAW|DIED|OTHER",
        r"^\d+ flips",
        ("{whole}", "60"),
        before="from sqrtdk.monitor import tables; tables.decode = tables.decode_part",
    ),
    Script(
        "fourth/laws/laws_repro",
        r"^1 .*(broken|critical)|^2 .*-> (kept|not asked)|^3 .*ask: (?!0\.0 )",
        "^3 .*ask: 0.0",
    ),
    Script("fourth/laws/laws_neutral", "CHANGED|HARNESS|DIED", r"\| same", seconds=1200),
    Script("fourth/laws/inf_key_half", "'auto': '[1-9]", "'auto': '0 of"),
    Script("fourth/laws/large", r"^\d+ .* [1-9]\d*$", "^all "),
    Script(
        "fourth/laws/cut_noise", r"wall (2[1-9]|[3-9]\d|\d{3,}) s| (1\.[1-9]|[2-9]\.\d|\d{2,}\.\d) GiB", "GiB", ("512",)
    ),
    Script("fourth/people/nan_cases", "^== blind (?!.*see no key)", "^== blind"),
    Script("fourth/people/calls", r"T=\d+ check calls (?!1 )|watch calls (?!1 )", "check calls 1 "),
    Script("fourth/people/negative_share", r"-\d+%|\d{4,}%", ".", paths=("../prototypes/front_ends",)),
    *(
        Script("-m sqrtdk", "Exit code 0", f"unexplained: {name} ", ("check", f"fourth.peers.lam:{case}"), paths=(".",))
        for case, name in (
            ("twice", "twice"),
            ("width", "model_dim"),
            ("heads", "head_count"),
            ("none", "missing"),
            ("derived", "derived_head"),
            ("odd", "unknown"),
        )
    ),
    *(
        Script("-m sqrtdk", "fail |warn ", "[Uu]nscaled|Luong", ("check", f"fourth.peers.luong:{name}"), paths=(".",))
        for name in ("dot", "general")
    ),
    Script("-m sqrtdk", "Aborted", "can't be read .steps 1 to 32", ("watch", "show", "{cases}/robust/run_that_aborts")),
)


def questions(cases: Path) -> Iterator[tuple[str, Callable[[], Answer], str]]:
    """Yield of every question its name, what asks it, and what a wrong answer waits for."""
    for report in REPORTS:
        file, _, case = report.name.partition(":")
        module = importlib.import_module(f"cases.{file}")
        if report.check:
            yield f"check {report.name}", partial(checked, report, module, case), report.waits
        if report.diff or report.words:
            yield f"diff {report.name}", partial(compared, report, module, case), report.waits
    for name, pattern in FILES.items():
        yield f"check files/{name}", partial(exact, str(cases / "files" / name), pattern), ""
    mixes = importlib.import_module("cases.files.mat_mix")
    for name in MIXES:
        yield f"check files/mat_mix:{name}", partial(exact, getattr(mixes, name), "10 keys"), ""
    for script in SCRIPTS:
        yield f"run {' '.join((script.name, *script.arguments))}", partial(ran, script, cases.resolve()), ""


def checked(report: Report, module: ModuleType, case: str) -> Answer:
    """Whether `check` says what it should of the broken module, and nothing of that kind of the right one."""
    least = LEVELS.index(report.check) if report.check != "quiet" else LEVELS.index("warn")
    named = {}
    for side in ("broken", "right"):
        make = getattr(module, f"{side}_{case}", None)
        found = sqrtdk.check(*make()).findings if make else ()
        loud = [one for one in found if LEVELS.index(one.severity) >= least]
        named[side] = [one for one in loud if re.search(report.says, one.message)]
    message = named["broken"][0].message if named["broken"] else "no such finding"
    if named["right"]:
        return False, f"a finding on the right version: {named['right'][0].message}"
    return bool(named["broken"]) == (report.check != "quiet"), message


def compared(report: Report, module: ModuleType, case: str) -> Answer:
    """Whether `diff` of the right and the broken module names the causes."""
    (a, inputs), (b, inputs_b) = (getattr(module, f"{side}_{case}")() for side in ("right", "broken"))
    try:
        found = sqrtdk.diff(a, b, inputs, inputs_b=inputs_b)
    except sqrtdk.SqrtdkError as error:
        return False, f"{type(error).__name__}: {error}"
    causes = "+".join(sorted({cause.name for pair in found.pairs for cause in pair.causes}))
    answer = f"{causes or 'no cause'}: {found.paragraphs[0]}"
    if report.diff == "same":
        return found.same is True, answer
    if report.diff == "differs":
        return found.same is False and not causes, answer
    worded = any(re.search(report.words, text) for text in found.paragraphs)
    return found.same is False and causes == report.diff and worded, answer


def exact(model: object, pattern: str) -> Answer:
    """Whether `check` reads attentions with the textbook scale alone, and so."""
    try:
        report = sqrtdk.check(model) if isinstance(model, str) else sqrtdk.check(*model())  # type: ignore[operator]
    except sqrtdk.SqrtdkError as error:
        return False, f"{type(error).__name__}: {error}"
    answers = [f"{call.verdict}, {call.call.key_len} keys, {call.formula}" for call in report.calls]
    answer = "; ".join(answers)
    right = bool(answers) and all(call.verdict == "exact" for call in report.calls)
    return right and re.search(pattern, answer) is not None, answer or "no attention"


def ran(script: Script, cases: Path) -> Answer:
    """Whether a script says what it should, and no line of it shows its fault."""
    begin = ["-m", "sqrtdk"] if script.name.startswith("-m") else [str(cases / f"{script.name}.py")]
    if script.before:
        begin = ["-c", f"{script.before}; import runpy; runpy.run_path({begin[0]!r}, run_name='__main__')"]
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole")
        if "{whole}" in script.arguments:
            shutil.copytree(cases / "robust" / "run_that_aborts", whole)
            min((whole / "parts").iterdir()).unlink()
        named = [argument.format(scratch=scratch, cases=cases, whole=whole) for argument in script.arguments]
        command = [sys.executable, *begin, *named]
        try:
            own = [os.environ.get("PYTHONPATH", ""), *(str((cases / path).resolve()) for path in script.paths)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, own))}
            done = subprocess.run(
                command, cwd=scratch, env=environment, capture_output=True, text=True, check=False,
                timeout=script.seconds,
            )  # fmt: skip
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as ended:  # a script that goes on for ever where nothing is wrong
            code, text = 0, (ended.stdout or b"").decode()
    faults = [line for line in text.splitlines() if re.search(script.fault, line)]
    shown = [line for line in text.splitlines() if re.search(script.shows, line)]
    if faults or code < 0:
        return False, faults[0] if faults else f"ended by signal {-code}"
    return bool(shown), shown[0] if shown else f"no line of it holds {script.shows!r}"


def main() -> int:
    """Print a line for each question and the count; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="?", type=Path, default=Path("../shared/cases"))
    parser.add_argument("--only", default="", help="questions whose name holds this text")
    arguments = parser.parse_args()
    if not (arguments.cases / "base.py").is_file():
        parser.error(f"{arguments.cases} holds no cases: name their folder")
    sys.path.insert(0, str(arguments.cases.resolve().parent))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for name, ask, waits in questions(arguments.cases):
        if arguments.only not in name:
            continue
        right, answer = ask()
        word = "right" if right else f"waits ({waits})" if waits else "WRONG"
        counts[word] += 1
        print(f"{word}: {name}: {answer[:200]}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()) or "no such question")
    return int(counts["WRONG"] > 0 or not counts)


if __name__ == "__main__":
    sys.exit(main())
