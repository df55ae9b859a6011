"""Several processes, one sample: the steps of all ranks are gathered, and joined along each axis of the ranks.

One collective per sampled step sends each rank's row of bytes (`packed`) to all ranks, so that all raise the same
alarms. A second one, of objects, sends the names of sites and tensors. It runs at the first sample, and whenever a
rank's row says that they changed or that its rows no longer fit; then the rows are gathered once more. `step()` calls
them, outside every hook. If a rank is gone they fail as any collective does: at once, or after the process group's
timeout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sqrtdk._modes import accelerator
from sqrtdk.errors import InvalidTypeError, InvalidValueError, OutputError, SqrtdkError, add_note, kind_and_text
from sqrtdk.messages import Message
from sqrtdk.monitor.packed import HEAD, Head, PackedStep, StepLayout, pack_step, unpack_step
from sqrtdk.monitor.shards import RankAxis, join_ranks
from sqrtdk.monitor.sums import WatchedStep

Answer = TypeVar("Answer")
Shards = str | Mapping[str, str]
SHARDS = ("rows", "summed", "heads", "keys", "stages", "same", "alone")
# The axes of a DeviceMesh, by their names in torchtitan and in torch's examples.
MESH_AXES: Mapping[str, str] = {
    **dict.fromkeys(("dp", "ddp", "fsdp", "hsdp", "dp_replicate", "dp_shard", "replicate", "shard", "batch"), "rows"),
    # ring attention: each rank has its own rows, and meets all keys
    **dict.fromkeys(("cp", "dp_cp", "dp_shard_cp"), "rows"),
    **dict.fromkeys(("tp", "head", "heads"), "heads"),
    "pp": "stages",
}
ROWS_BYTES = 64 << 20  # of all ranks together, for the rows that quantiles are taken over
LAYOUT_SLACK = 1.25  # room for a longer batch, so that the row need not be resized at once


@dataclass(eq=False)
class Ranks:
    """The processes that watch one model together; see `ranks_of`.

    Attributes:
        axes: of the grid of ranks, the last one varies fastest.
        order: rank numbers in the group, in the order of the grid.
        group: None: all processes.
        rows_bytes: see `ROWS_BYTES`.
    """

    axes: tuple[RankAxis, ...]
    order: tuple[int, ...]
    group: Any = None
    rows_bytes: int = ROWS_BYTES
    _capacity: int = HEAD
    _sent_layout: StepLayout | None = None
    _layouts: list[StepLayout] = field(default_factory=list)

    @property
    def first(self) -> bool:
        """Whether this rank is the first of its group, which writes the records."""
        return dist.get_rank(self.group) == 0

    def first_says(self, ask: Callable[[], Answer]) -> Answer:
        """Call a function on the first rank only, and return its result on all ranks.

        Every rank must call this.

        Args:
            ask: Function without arguments; its result must be picklable.

        Raises:
            SqrtdkError: The function raised it on the first rank.
            OutputError: The function raised another exception there; the first rank itself sees that exception.
        """
        box: list[Any] = [None, None]
        if self.first:
            try:
                box[0] = ask()
            except Exception as error:
                # Errors of other classes may not survive pickling, so the other ranks get their text.
                known = isinstance(error, SqrtdkError)
                box[1] = error if known else OutputError(kind_and_text(error), hint="See what the first rank says.")
                dist.broadcast_object_list(box, group=self.group, group_src=0)
                raise
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        if box[1] is not None:
            raise box[1]
        answer: Answer = box[0]
        return answer

    def gather(self, own: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks; every rank must call this.

        Args:
            own: This rank's value, which must be picklable.
        """
        every: list[Any] = [None] * len(self.order)
        dist.all_gather_object(every, own, group=self.group)
        return every

    def joined(self, step: WatchedStep, number: int = 0) -> WatchedStep:
        """Return the step of all ranks together, from this rank's; every rank must call it, even without measurements.

        Args:
            step: This rank's step.
            number: Number of the step, which must be equal on all ranks.

        Raises:
            InvalidValueError: On every rank, if the numbers differ.
            RuntimeError: From torch.distributed, if a rank is gone or does not arrive in time.
        """
        row = self._row(step)
        row = replace(row, head=row.head._replace(step=float(number)))
        try:
            rows, heads = self._gathered(row)
        except Exception as error:
            add_note(error, "sqrtdk.watch gathers the statistics of all ranks here: every rank calls step() as often.")
            raise
        if len(numbers := {int(head.step) for head in heads}) > 1:
            raise InvalidValueError(
                f"the ranks sample different steps at once: {', '.join(map(str, sorted(numbers)))}",
                hint="every= has to say the same of a step on every rank, and every rank calls step() as often.",
            )
        stride = int(max(head.every for head in heads))
        steps = [
            unpack_step(each, layout, head, stride)
            for each, layout, head in zip(rows, self._layouts, heads, strict=True)
        ]
        found = join_ranks([steps[number] for number in self.order], self.axes)
        # With sharded weights each rank knows the change of its own shards; the largest is what the alarm is about.
        moved, drift = (
            max((one for one in of_ranks if not math.isnan(one)), default=None)
            for of_ranks in ([head.relative_step for head in heads], [head.drift for head in heads])
        )
        found = replace(found, relative_step=moved, drift=drift, learning_rate=step.learning_rate)
        if stride > 1:
            found = replace(found, missed=(*found.missed, Message("alarms.unmeasured.thinned", every=stride)))
        return found

    def _row(self, step: WatchedStep) -> PackedStep:
        most = self.rows_bytes // len(self.order)
        by_row = any(axis.shards == "keys" for axis in self.axes)
        try:
            with torch.no_grad():
                return pack_step(step, by_row=by_row, most=most)
        except Exception as error:  # the other ranks wait for this one's row
            lost = Message("alarms.unmeasured.not_packed", error=kind_and_text(error))
            # A rank that does not send would leave the others waiting until a time-out, so it sends the reason alone.
            return pack_step(replace(step, calls=(), missed=(*step.missed, lost)), by_row=by_row, most=most)

    def _gathered(self, row: PackedStep) -> tuple[list[Tensor], list[Head]]:
        """Return the packed rows of all ranks, and their heads.

        All ranks gather again as long as one has another layout than before, or needs more bytes than a row has.
        """
        device = _device(self.group)
        size = len(self.order)
        while True:
            # Layouts (names and shapes) are pickled, which is slow, but they change only when the model or the batch
            # does.
            head = row.head._replace(changed=float(row.layout != self._sent_layout))
            own = replace(row, head=head).bytes(self._capacity, device)
            every = torch.empty(size * self._capacity, dtype=torch.uint8, device=device)
            _gather(every, own, group=self.group)
            rows = list(every.view(size, self._capacity))
            heads = [Head(*one) for one in _heads(every.view(size, self._capacity))]
            needed = int(max(head.needed for head in heads))
            if needed <= self._capacity and not any(head.changed for head in heads):
                return rows, heads
            layouts: list[Any] = [None] * size
            dist.all_gather_object(layouts, row.layout, group=self.group)
            self._layouts, self._sent_layout = layouts, row.layout
            if needed > self._capacity:
                self._capacity = 8 * math.ceil(needed * LAYOUT_SLACK / 8)


def ranks_of(group: Any = None, shards: Shards | None = None) -> Ranks | None:
    """Return the ranks that watch together, or None if this process watches alone.

    Args:
        group: a process group, a DeviceMesh over all processes, or None: all processes, if torch.distributed runs.
        shards: how the work is split over the ranks. "rows": each rank has its own batch, or its own part of each
            sequence (data parallel, sharded, ring attention). "summed": the same, but gradients are summed, and the
            loss of a rank is its share of the total, a sum over its tokens divided by the tokens of all ranks. "heads":
            tensor parallel, in order. "keys": each has a part of the keys of every row; the statistics of each row are
            sent, so `rows` should be small. "stages": layers. "same": all do the same. "alone": each is watched for
            itself. With a DeviceMesh, one such word for each axis whose name is not in `MESH_AXES`, or has another
            meaning.

    Raises:
        InvalidValueError: A word is unknown, an axis has none, or the mesh covers only some processes.
        InvalidTypeError: `group` is not a group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    names = getattr(group, "mesh_dim_names", None)
    mesh = getattr(group, "mesh", None)
    if isinstance(mesh, Tensor):
        axes = tuple(
            RankAxis(size, _word((names or ())[at] if names else "", shards)) for at, size in enumerate(mesh.shape)
        )
        if mesh.numel() != dist.get_world_size():
            raise InvalidValueError(
                f"a mesh is of all processes; got {mesh.numel()} of {dist.get_world_size()}",
                hint="Pass the whole mesh, or the process group of one of its axes.",
            )
        return Ranks(axes, tuple(mesh.flatten().tolist()))
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidTypeError(
            f"group is a process group or a DeviceMesh; got {type(group).__name__}", hint="None: all processes."
        )
    word = _word("", shards or "rows")
    size = dist.get_world_size(group)
    return None if size < 2 or word == "alone" else Ranks((RankAxis(size, word),), tuple(range(size)), group)


def _word(axis: str, shards: Shards | None) -> str:
    """Return how the ranks along an axis split the work."""
    word = shards if isinstance(shards, str) else {**MESH_AXES, **(shards or {})}.get(axis)
    if word not in SHARDS or (word == "alone" and axis):
        listed = ", ".join(f'"{one}"' for one in SHARDS)
        of = f" of the axis {axis!r}" if axis else ""
        raise InvalidValueError(f"shards{of} is one of {listed}; got {word!r}", hint='For data parallel pass "rows".')
    return word


def _gather(every: Tensor, own: Tensor, group: Any) -> None:
    """Gather one tensor from all ranks; torch 2.13 renamed the collective, and warns of the old name."""
    if hasattr(dist, "all_gather_single"):
        dist.all_gather_single(every, own, group=group)
    else:
        dist.all_gather_into_tensor(every, own, group=group)


def _device(group: Any) -> torch.device:
    """Return the device of the group's collectives."""
    backend = str(dist.get_backend(group))
    device = accelerator()
    if "gloo" in backend or "mpi" in backend or device is None:
        return torch.device("cpu")
    return torch.device(device.type, torch.accelerator.current_device_index())


def _heads(rows: Tensor) -> Sequence[Sequence[float]]:
    heads: list[list[float]] = rows[:, :HEAD].contiguous().view(torch.float64).tolist()
    return heads
