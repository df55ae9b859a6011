"""`trace(model)`: a context manager that records every attention that runs inside it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor, nn

from sqrtdk._guesses import with_leads
from sqrtdk._modes import default_device, eager_compiler, outside_modes
from sqrtdk._shown import Guessed
from sqrtdk._wrappers import hint_for, named_modules
from sqrtdk.errors import InvalidTypeError, InvalidValueError, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.tracing.calls.finish import RowLimit, call_of_reading, site_in_program
from sqrtdk.tracing.calls.formula import Lost, lost_formula, without_softmax
from sqrtdk.tracing.calls.keep import ENLARGED_RUN, keep_tensors, missing_tensors, projections_of, sketch_of
from sqrtdk.tracing.calls.places import ValueOperands, of_exponentials, of_kernel, value_operands
from sqrtdk.tracing.calls.traced_call import TracedCall, merged_record
from sqrtdk.tracing.calls.visible_keys import TokensOf
from sqrtdk.tracing.calls.whole_call import reading_of_whole, under_the_tape
from sqrtdk.tracing.lower.classifier import Classifier
from sqrtdk.tracing.lower.online import close_partial_sums
from sqrtdk.tracing.lower.sums import multiplies
from sqrtdk.tracing.lower.weights import overwritten
from sqrtdk.tracing.readback.eager import read_eager
from sqrtdk.tracing.readback.edges import read_edges
from sqrtdk.tracing.readback.kernels import KERNELS
from sqrtdk.tracing.readback.lineage import remembered
from sqrtdk.tracing.readback.online import read_online
from sqrtdk.tracing.readback.orient import pools_positions
from sqrtdk.tracing.readback.reading import Reading
from sqrtdk.tracing.records import (
    AttentionCall,
    Missed,
    NotAttention,
    NotMeasured,
    numbers_by_site,
    why_not_attention,
)
from sqrtdk.tracing.tape import places
from sqrtdk.tracing.tape.node import Finished, Node, Online, SoftmaxEntry, SoftmaxRun
from sqrtdk.tracing.tape.places import Place, Sites
from sqrtdk.tracing.tape.recorder import (
    KernelCall,
    Operands,
    Recorder,
    Scene,
    TapeListener,
    Unweighted,
    WholeCall,
    unseen,
)
from sqrtdk.tracing.tape.store import NodeStore, ProjectionGradients
from sqrtdk.tracing.tape.travel import world_size
from sqrtdk.tracing.tensors import CallRows, CallTensors, Projection


class Trace(Guessed):
    """A context manager that records attentions while its block runs. Its attributes are complete when the block ends.

    Attributes:
        model: The traced model.
        calls: One record for every attention, in order.
        not_attention: Softmaxes that are not an attention.
        not_measured: Attentions that could not be measured, with the reasons.
        unread: Names of the model's parameters that no operation read.
        ranks: Number of ranks if the model ran collectives, else 1.
        tensors: With `keep`, the tensors of every call, in the same order; with only `projections`, sketches of them.
        rows: With `rows`, the row statistics of every call, in the same order; None for a call without any.
        whole_rows: Whether the rows of each call are rows of this rank's tokens over all keys, on whatever ranks.
        nonfinite: With `rows`, for the blocks of keys of every call, whether they came from another rank, and how many
            numbers in them are not finite, (); None if unknown.
        projections: With `projections`, those of q and k of every call, without inputs and weights.
        roots: Serial numbers of the nodes that q and k of every call come from, as passed to `gradients`' callback.
    """

    apart = True  # blocks of a ring stay records of their own in a trace that keeps tensors

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        stats: bool = True,
        numeric: bool = True,
        enlarge: Mapping[tuple[str, int], float] | None = None,
        tokens: TokensOf | None = None,
        values: Mapping[str, Tensor] | None = None,
        keep: bool = False,
        rows: RowLimit | None = None,
        projections: bool = False,
        sites: Sites | None = None,
        gradients: ProjectionGradients | None = None,
        formulas: bool = True,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise InvalidTypeError(
                f"trace() takes an nn.Module or None, got {type(model).__name__}",
                hint=hint_for(model, "Pass the model itself; to audit a name or a directory use sqrtdk.check()."),
            )
        self.calls: tuple[AttentionCall, ...] = ()
        self.not_attention: tuple[NotAttention, ...] = ()
        self.not_measured: tuple[NotMeasured, ...] = ()
        self.unread: frozenset[str] = frozenset()
        self.ranks = 1
        self.tensors: tuple[CallTensors, ...] = ()
        self.rows: tuple[CallRows | None, ...] = ()
        self.whole_rows: tuple[bool, ...] = ()
        self.nonfinite: tuple[tuple[tuple[bool, Tensor | None], ...], ...] = ()
        self.projections: tuple[tuple[Projection | None, Projection | None], ...] = ()
        self.roots: tuple[tuple[int | None, int | None], ...] = ()
        self.model = model
        self._stats = stats
        self._numeric = numeric and enlarge is None  # the slope would include the factor on q
        self._enlarge = enlarge or {}
        self._tokens = tokens
        self._values = values or {}
        self._keeps = keep
        self._projects = projections
        self._most_rows = rows
        self._gradients = gradients
        self._offered: Counter[str] = Counter()
        self._records: list[TracedCall | None] = []  # None for a block that was merged into another record
        self._missed = Missed(formulas=formulas)
        # A caller that passes `sites` enters them itself: hooks can't be added or removed during a call of the model.
        self._follows = sites is None
        self._sites = Sites(model) if sites is None else sites
        self._modules = self._sites.modules if model is None else dict(named_modules(model))
        self._scene: Scene | None = None
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Trace:
        store = NodeStore(self.model, self._sites, self._values, overwritten)
        store.asked = self._gradients
        listener = TapeListener(
            self._eager, self._kernel, self._miss, self._factor, self._unsoftened, self._whole, self._online, self._end
        )
        keeps, measures = self._keeps or self._projects, self._stats or self._most_rows is not None
        scene = self._scene = Scene(store, self._sites, listener, measures, keep=keeps)
        queries = {op: kernel.query for op, kernel in KERNELS.items()}
        with contextlib.ExitStack() as stack:
            if self._follows:
                stack.enter_context(self._sites)
            stack.enter_context(eager_compiler())
            stack.enter_context(Recorder(scene, Classifier(scene), queries))
            self._running = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._scene is not None
        scene = self._scene
        if scene.store.asked is not None:
            scene.store.asked.attach()
        self._running.__exit__(kind, error, traceback)
        close_partial_sums(scene)
        # Softmaxes whose weights are still alive: all others ended when their weights were freed.
        for softmax_run in list(scene.store.softmax_runs):
            self._end(softmax_run)
        lost = [entry for entry in scene.entries if not entry.attention]
        self.not_attention = tuple(
            NotAttention(
                entry.site, number, entry.shape, why_not_attention(entry.code), entry.formula, _where(entry), entry.code
            )
            for entry, number in zip(lost, numbers_by_site(entry.site for entry in lost), strict=True)
        )
        self.not_measured = self._missed.entries(record.call.site for record in self._records if record)
        self.unread = scene.store.unread()
        scene.store.close()
        self.ranks = world_size() if scene.travel.count else 1
        self._scene = None
        self._sites.entering = self._sites.leaving = None
        records = [record for record in self._records if record is not None]
        numbers = numbers_by_site(record.call.site for record in records)
        calls = scene.travel.without_parts([(record.call, record.journey) for record in records])
        self.calls = tuple(replace(call, index=n) for (call, _), n in zip(calls, numbers, strict=True))
        self.whole_rows = tuple(whole for _, whole in calls)
        self.rows = tuple(record.rows for record in records)
        self.roots = tuple(record.journey.roots for record in records)
        self.nonfinite = tuple(record.nonfinite for record in records)
        self.projections = tuple(record.projections for record in records if record.tensors is not None)
        self.tensors = tuple(
            replace(record.tensors, site=call.site, index=call.index, call=call)
            for record, call in zip(records, self.calls, strict=True)
            if record.tensors is not None
        )

    @property
    def so_far(self) -> int:
        """Number of attentions so far. Attentions to blocks of keys count by block, though they become one record."""
        return len(self._records)

    def after(self, so_far: int) -> AttentionCall | None:
        """Return the first attention that ran after `so_far` had that value, or None. Call it after the block."""
        before = sum(record is not None for record in self._records[:so_far])
        return self.calls[before] if before < len(self.calls) else None

    def node(self, tensor: Tensor) -> Node:
        """Return the tape's node of a tensor while the block runs, to inspect the trace."""
        if self._scene is None:
            raise InvalidValueError("the trace is not running", hint="Ask inside of its `with` block.")
        return self._scene.store.node(tensor)

    # -- what the recorder tells -----------------------------------------------------------------------------------

    def _eager(self, softmax_run: SoftmaxRun, value: Tensor, output: Tensor) -> None:
        entry = softmax_run.entry
        with self._guarded(entry.site, softmax_run, entry.place):
            if softmax_run.edges is not None:
                reading = read_edges(softmax_run, softmax_run.edges, value, output)
            else:
                reading = read_eager(
                    softmax_run, value, output, heads_hint=places.declared_heads(self._modules, entry.site)
                )
            if isinstance(reading, str):
                entry.attention, entry.code = False, reading
            else:
                assert self._scene is not None
                entry.record = len(self._records)
                used = value_operands(value, self._scene.store.node(value), softmax_run)
                self._add(replace(reading, place=entry.place), used, [softmax_run.node, used.node])

    def _online(self, run: Online) -> None:
        entry = run.parts[0].entry
        with self._guarded(entry.site, None, entry.place):
            if all(isinstance(part, Finished) for part in run.parts):
                self._merge([part.entry.record for part in run.parts if part.entry.record is not None])
                return
            travelled = self._scene is not None and self._scene.travel.count > 0
            attentions = read_online(run, places.declared_heads(self._modules, entry.site), travelled=travelled)
            if isinstance(attentions, str):
                self._miss(entry.site, attentions)
                return
            for blocks in attentions:
                first = len(self._records)
                for block in blocks:
                    used = of_exponentials(block, weights=self._keeps or self._projects)
                    self._add(replace(block.reading, place=entry.place), used, block.nodes)
                self._merge(range(first, len(self._records)))

    def _kernel(self, call: KernelCall) -> None:
        operands = Operands(call.op.partition("::")[2], {name: node for name, node in call.nodes.items() if node.act})
        with self._guarded(call.site, operands, call.place):
            kernel = KERNELS[call.op]
            self._add(replace(kernel.read(call, kernel), place=call.place), of_kernel(call), call.vectors, call.entry)

    def _whole(self, ran: WholeCall) -> None:
        assert self._scene is not None
        with torch.no_grad():
            prepared = under_the_tape(ran, self._scene, places.declared_heads(self._modules, ran.site))
        with self._guarded(ran.site, None, ran.place):
            self._add(*reading_of_whole(ran, prepared), prepared.kernel.vectors, ran.entry)

    def _unsoftened(self, site: str, weights: Unweighted) -> None:
        place = places.current_place()
        with self._guarded(site, weights, place), remembered():
            code, reason, formula = without_softmax(weights)
            self._missed.add(site, reason, places.place_text(place), lambda: formula or self._formula(weights), code)

    def _end(self, softmax_run: SoftmaxRun) -> None:
        """Describes a softmax whose weights met no values. Called when they are freed, and when the trace ends."""
        entry = softmax_run.entry
        if entry.attention or entry.reported or entry.code not in ("never_used", "lost_sight") or self._scene is None:
            return
        entry.reported = True
        if entry.lost or entry.code == "lost_sight":
            entry.formula = self._formula(softmax_run)
        # The weights entered an operation that is not followed. What the logits are decides how likely an attention is.
        if entry.code == "never_used" and entry.lost:
            if entry.formula is not None:
                entry.code = "lost_additive"
            elif multiplies(softmax_run.node):
                entry.code = "lost_sight"
            else:
                entry.code = "not_seen"
                with contextlib.suppress(Exception), outside_modes():
                    entry.code = "separable" if pools_positions(softmax_run) else "not_seen"

    def _formula(self, lost: Lost | None) -> str | None:
        """Return the formula up to the point of loss, or None. It may be called at any time, so modes are disabled."""
        with contextlib.suppress(Exception), outside_modes():
            return None if lost is None else lost_formula(lost)
        return None

    @contextlib.contextmanager
    def _guarded(self, site: str, lost: Lost | None, place: Place | None) -> Iterator[None]:
        """Lists a reading that raises as not measured, because a trace must not stop the model."""
        default = default_device()  # torch.device as a mode slows every operation, so CPU needs none
        on_cpu = contextlib.nullcontext() if default.type == "cpu" else torch.device("cpu")
        try:
            with torch.no_grad(), on_cpu, unseen():
                yield
        except Exception as error:
            reason = Message("trace.missed.reading_failed", error=kind_and_text(error))
            self._missed.add(site, reason, places.place_text(place), lambda: self._formula(lost))

    def _miss(self, site: str, reason: str, lost: Unweighted | Operands | None = None) -> None:
        self._missed.add(site, reason, places.place_text(places.current_place()), lambda: self._formula(lost))

    def _add(
        self, reading: Reading, used: ValueOperands | None, nodes: Sequence[Node], entry: SoftmaxEntry | None = None
    ) -> None:
        assert self._scene is not None  # `nodes` are those of q, k and v, or of their logits
        reading = replace(reading, site=site_in_program(reading, self._modules))
        call, rows = call_of_reading(
            reading,
            self._sites.classes.get(reading.site, ""),
            measure_stats=self._stats and self._most_rows is None,
            measure_slope=self._numeric,
            tokens=self._tokens,
            rows=self._most_rows,
        )
        roots = reading.query.root, reading.key.root, None if used is None else used.node
        logits = None if entry is None else entry.logits
        journey = self._scene.travel.journey(nodes, *roots, logits)
        bad = () if rows is None else ((journey.came, rows.key_nonfinite),)
        record = TracedCall(call, rows, journey, nonfinite=bad)
        if self._keeps or self._projects:
            whole = missing_tensors(call, Message(ENLARGED_RUN)) if self._enlarge else keep_tensors(reading, used, call)
            tensors = whole if self._keeps else sketch_of(whole)
            record = replace(record, tensors=tensors, projections=projections_of(whole))
        if entry is not None:
            entry.record = len(self._records)
        self._records.append(record)

    def _merge(self, numbers: Sequence[int]) -> None:
        """Merges attentions to blocks of keys, whose outputs were weighted by their sums, into one record."""
        blocks = [record for number in numbers if (record := self._records[number]) is not None]
        if self._keeps and self.apart and self._scene and any(self._scene.travel.goes(x.journey) for x in blocks):
            return  # the blocks of a ring are put together with those of the other ranks, from their tensors
        whole = merged_record(blocks) if len(blocks) == len(numbers) > 1 else None
        if whole is not None:
            for number in numbers:
                self._records[number] = None
            self._records[numbers[0]] = whole

    def _factor(self, site: str) -> float | None:
        if not self._enlarge:
            return None
        index = self._offered[site]
        self._offered[site] += 1
        return self._enlarge.get((site, index))


def _where(entry: SoftmaxEntry) -> str | None:
    return places.place_text(entry.lost_at if entry.reported and entry.lost_at else entry.place)


@with_leads
def trace(
    model: nn.Module | None = None,
    *,
    stats: bool = True,
    numeric: bool = True,
    enlarge: Mapping[tuple[str, int], float] | None = None,
    keep: bool = False,
) -> Trace:
    """Records every attention that runs inside a `with` block, on any device, `meta` included.

    The model runs unchanged: outputs are bit-equal, and hooks are removed at the end, even if the model raises. Only
    the calling thread is traced. Backward passes and recomputed forwards are not counted. Compiled models run eagerly
    inside the block.

    Args:
        model: The module whose paths name the sites and whose parameters are told apart from activations. With None
            there are no names.
        stats: Measure exact statistics of every call, from its q, k, bias and mask.
        numeric: Read the scale from the logits as well as from the code.
        enlarge: Multiply q of the call at (site, index) by this number, to make small logits large. This changes the
            model's outputs on purpose, and switches `numeric` off.
        keep: Keep q, k, v, the output, and everything else needed to compute every call again, in `tensors`.

    Returns:
        The context manager. Its `calls`, `not_attention` and `not_measured` are complete after the block.

    Raises:
        InvalidTypeError: `model` is not a module.

    Example:
        >>> import torch
        >>> layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> x = torch.randn(1, 6, 32)
        >>> with trace(layer) as run:
        ...     _ = layer(x, x, x)
        >>> [(call.heads, call.head_dim, call.formula) for call in run.calls]
        [(4, 8, 'softmax(0.3536 * q.k)')]
    """
    return Trace(model, stats=stats, numeric=numeric, enlarge=enlarge, keep=keep)
