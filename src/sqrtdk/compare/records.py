"""Results of a comparison: frozen records, one `PairDiff` for each pair of calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sqrtdk._shown import Saved, Shown
from sqrtdk.compare.backward.records import BackwardDiff
from sqrtdk.compare.backward.records import FirstModule as FirstModule
from sqrtdk.compare.weights.records import WeightsReport
from sqrtdk.messages import Message

DIFF_FAIL_ON = ("different", "unmeasured", "never")
CANCELS = "compare.stage.cancels"
LackingSide = Literal["", "a", "b"]
UNKNOWN_CAUSE = "unknown"  # stands in for a cause that was not found


def stage_word(stage: str) -> str:
    """Return the name of a stage as a message of the catalogue; a name that is not in `STAGES` stays as it is."""
    return _word(f"stages.{stage.replace(' ', '_')}", stage)


def kind_word(kind: str) -> str:
    """Return the kind of a side ("model", "trace file") as a message of the catalogue; an unknown one stays."""
    return _word(f"compare.side.{kind.replace(' ', '_')}", kind)


def cause_word(cause: str) -> str:
    """Return the name of a cause as a message of the catalogue; one without an entry stays as it is."""
    return _word(f"causes.{cause}.title", cause)


def _word(id: str, name: str) -> str:
    try:
        return Message(id)
    except KeyError:  # of an untrusted record, or of a test
        return name


@dataclass(frozen=True, slots=True)
class Cause:
    """A proven reason for a difference: applied to A, it removes the difference that it makes.

    Attributes:
        name: one of the names in docs/en/diff.md.
        a: what A does, as a number or short text.
        b: what B does.
        explained: share of the difference that disappears with it once all other causes of the pair are applied.
        text: a sentence without its subject: "leaves out the softcap (50)"; a `sqrtdk.messages.Message`.
        stage: where it acts.
        at_a: file and line of A that do this, or behind which it is missing: "models/llama/modeling_llama.py:193"; None
            if no code was recorded, as in a file.
        at_b: the same of B.
        mends: False if A's parts were put into B's program and the difference did not go away; then no fix is said.
        codes: what the cause is in particular, most particular first: "on_rows" of `padding`. By them a fix is found.
        lacks: the side that has nothing of the kind, "a" or "b"; "" if both have.
        written: what B is: "gguf llama", a file of llama.cpp with its architecture; "port", a program of JAX or MLX;
            "" for others. Fixes name its keys.
    """

    name: str
    a: str | float | None
    b: str | float | None
    explained: float
    text: str
    stage: str
    at_a: str | None = None
    at_b: str | None = None
    mends: bool = True
    codes: tuple[str, ...] = ()
    lacks: LackingSide = ""
    written: str = ""


@dataclass(frozen=True, slots=True)
class StageDiff:
    """One stage of a pair.

    Attributes:
        stage: one of `STAGES`.
        same: whether it agrees within rounding; None if it could not be compared.
        largest: largest difference of B's values from what A's formula gives for B's values before the stage, in the
            unit of the values; None if the stage has no numbers.
        allowed: what the rounding of both sides allows, in the same unit.
        a: for a stage that is no tensor, A's as short text.
        b: B's as short text.
        reason: why it could not be compared, `CANCELS`, or which rows are left out.
        cancels: whether it differs without changing the output, like weights and a rotation that are permuted alike.
    """

    stage: str
    same: bool | None
    largest: float | None = None
    allowed: float | None = None
    a: str | None = None
    b: str | None = None
    reason: str | None = None
    cancels: bool = False


@dataclass(frozen=True, slots=True)
class Scatter:
    """Logits of some entries of one head on both sides; all tuples are parallel.

    Attributes:
        head: number of the query head.
        rows: row of each entry.
        keys: key of each entry.
        a: logits of A.
        b: logits of B.
    """

    head: int
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MaskPicture:
    """A part of two masks that differ.

    Attributes:
        first_row: number of the first row shown.
        first_key: number of the first key shown.
        rows: a text for each row, with a character for each key: "+" is visible in both, "." in neither, "a" only in A,
            "b" only in B.
    """

    first_row: int
    first_key: int
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PairDiff:
    """Two calls that belong together.

    Attributes:
        site_a: module path in A.
        site_b: module path in B.
        index_a: number of the call at its site in A.
        index_b: number of the call at its site in B.
        same: whether the outputs agree within rounding for the same input; None if that could not be judged.
        first_stage: first stage that differs; None if none does.
        follows_from: site of A ("site#1" if its index is not 0) whose difference is the only reason for this one; None
            if this pair has a difference of its own, or none.
        causes: causes in the order in which they were found.
        residue: largest difference of the outputs that is left with all causes applied.
        allowed: what rounding allows for it.
        difference: largest difference of the outputs without causes.
        explained: share of the difference that disappears with all causes; None if there is no difference.
        stages: every stage.
        formula_a: formula of A's call, as in its record.
        formula_b: formula of B's call, as in its record.
        reason: why `same` is None.
        scatter: sample logits for the page; empty if nothing differs.
        picture: picture of the masks if they differ.
        rows: query rows of all sequences in the batch; 0 if nothing was judged.
        rows_left_out: rows of these that see no key on one side; their output is undefined.
    """

    site_a: str
    site_b: str
    index_a: int
    index_b: int
    same: bool | None
    first_stage: str | None
    follows_from: str | None
    causes: tuple[Cause, ...]
    residue: float | None
    allowed: float | None
    difference: float | None = None
    explained: float | None = None
    stages: tuple[StageDiff, ...] = ()
    formula_a: str | None = None
    formula_b: str | None = None
    reason: str | None = None
    scatter: tuple[Scatter, ...] = ()
    picture: MaskPicture | None = None
    rows: int = 0
    rows_left_out: int = 0

    @property
    def cancelling(self) -> tuple[str, ...]:
        """Return the names of the stages that differ without changing the output."""
        return tuple(stage.stage for stage in self.stages if stage.cancels)


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A call without a partner, or an attention of one side that could not be read.

    Attributes:
        site: path of its module.
        index: number of the call at this site.
        formula: what is known of its computation, as text; None if nothing.
        reason: why it has no partner or could not be read.
    """

    site: str
    index: int
    formula: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class SideInfo:
    """One side.

    Attributes:
        name: name as given: "demo", a directory, "b.safetensors".
        kind: "model", "trace file", "onnx", "exported".
        module_class: class name, or the writer of a trace file.
        attn: attention implementation, if one was chosen.
        dtype: dtype of its attention.
        device: device on which it ran.
        calls: number of attentions.
        versions: versions of the packages that matter.
        framework: framework and version of a program that is run as torch operations, "JAX 0.10.2"; "" for others.
    """

    name: str
    kind: str
    module_class: str = ""
    attn: str | None = None
    dtype: str = ""
    device: str = ""
    calls: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    framework: str = ""


@dataclass(frozen=True, slots=True)
class OutputDiff:
    """One tensor that both models return.

    Attributes:
        name: its place in A's result: "logits", "0", "past_key_values.0.key".
        same: whether it agrees within rounding; None if both sides have NaN, or for `reason`.
        difference: root mean square of the difference, as a share of that of A's tensor; if only single entries differ,
            the largest of each. None if unknown.
        allowed: what the rounding of both sides allows, as the same share.
        reason: why it has no figures: another shape, or a rounding that can't be measured.
    """

    name: str
    same: bool | None
    difference: float | None
    allowed: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ModuleCause:
    """A reason for a difference outside attention, at the place where the difference enters.

    Attributes:
        name: one of the names in docs/en/diff.md; "unknown" if none was found.
        site_a: the module in A; "" is the whole model.
        site_b: the module in B.
        a: what A has, as a number or short text; None if it has nothing of the kind, or if no value says it.
        b: what B has.
        proven: True if A gave what B gives there once it had B's part; False if the cause is read off the numbers.
        text: half a sentence: "`eps` is 1e-05 in A, 0.01 in B"; "" if unknown.
        others: modules of A that differ alike.
        at_b: file and lines of B's code with the difference; None if no code shows it, as for a weight.
        fix: what to change in B; None if nothing is advised.
    """

    name: str
    site_a: str
    site_b: str
    a: str | float | None
    b: str | float | None
    proven: bool
    text: str
    others: tuple[str, ...] = ()
    at_b: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class DiffReport(Saved, Shown):
    """The result of a comparison.

    Attributes:
        a: side A.
        b: side B.
        pairs: pairs in A's order.
        unpaired_a: calls of A without a partner.
        unpaired_b: calls of B without a partner.
        paragraphs: the result in sentences, most important first.
        forwards: how often each side ran.
        seed: seed of the run.
        command: the user's command line.
        environment: description of this machine.
        fail_on: see `exit_code`.
        outputs: what the models return, tensor by tensor; empty if not compared.
        first_module: where the models begin to differ apart from attentions with causes; None if they don't, or if
            unknown.
        outputs_from: half sentences on that place and on later differences: "the first difference is in `lm_head`:
            Linear in A, LowRank in B; nothing else differs"; "which follows from the attentions" if they explain all of
            it; "which the attentions alone do not explain; another difference is in `lm_head`".
        outputs_follow: whether the differences of the attentions explain all of the difference of the outputs.
        outputs_missing: why the outputs were not compared.
        module_causes: causes outside attention, in the order of the run.
        weights: which weight of A is which of B; None if a side has none, as a file.
        backward: comparison of the gradients; None if it was not asked for.
    """

    a: SideInfo
    b: SideInfo
    pairs: tuple[PairDiff, ...]
    unpaired_a: tuple[Unpaired, ...]
    unpaired_b: tuple[Unpaired, ...]
    paragraphs: tuple[str, ...]
    forwards: tuple[int, int] = (1, 1)
    seed: int = 0
    command: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    fail_on: str = "different"
    outputs: tuple[OutputDiff, ...] = ()
    first_module: FirstModule | None = None
    outputs_from: str = ""
    outputs_follow: bool = False
    outputs_missing: str | None = None
    module_causes: tuple[ModuleCause, ...] = ()
    weights: WeightsReport | None = None
    backward: BackwardDiff | None = None

    def __repr__(self) -> str:
        differ = sum(pair.same is False for pair in self.pairs)
        alone = len(self.unpaired_a) + len(self.unpaired_b)
        named = (cause.name for pair in self.pairs for cause in pair.causes)
        causes = dict.fromkeys(name if name.isidentifier() else repr(name) for name in named)
        word = "not judged" if self.same is None else "same" if self.same else "different"
        told = f"{len(self.pairs)} pairs, {differ} differ" + (f", {alone} without a partner" if alone else "")
        return f"DiffReport({self.a.name!r}, {self.b.name!r}, {word}; {told}; causes: {', '.join(causes) or 'none'})"

    @property
    def same(self) -> bool | None:
        """Whether every call has a partner and agrees within rounding, and so does every output that both models
        return, and every gradient if these were compared, and an adapter or a rounding of weights has no mistake; None
        if some could not be judged, an adapter under a rounding is one of these, and no difference was found. A right
        adapter and a right rounding are no difference: they are in `weights.known`, with what they cost.
        """
        judged = [pair.same for pair in self.pairs] + [one.same for one in self.outputs]
        judged += [] if self.backward is None else [self.backward.same]
        known = None if self.weights is None else self.weights.known
        if self.unpaired_a or self.unpaired_b or (known is not None and known.faults) or False in judged:
            return False
        return None if None in judged or (known is not None and known.undecided) else True

    @property
    def ok(self) -> bool:
        """Whether everything was judged and nothing differs."""
        return self.same is True

    @property
    def exit_code(self) -> int:
        """Return the exit status of the command: 1 or 0.

        It is 1 if the sides differ, and with fail_on "unmeasured" also if something could not be judged. With "never"
        it is 0.
        """
        if self.fail_on == "never":
            return 0
        return int(self.same is False or (self.fail_on == "unmeasured" and self.same is None))
