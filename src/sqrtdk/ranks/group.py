"""The ranks of a job: what they tell one another, within a time limit, and how an error of one reaches all.

Ranks announce in the store of the process group that they have arrived, or why they have not. A rank that waits there
hears of an error at once, even if others hang in a collective; the data follow in a collective once all have arrived.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sqrtdk._modes import accelerator
from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text, said_by
from sqrtdk.messages import Message

Answer = TypeVar("Answer")
WAIT_SECONDS = 300.0  # that the first rank to arrive waits for the last, which may load a model meanwhile
_POLL_SECONDS = 0.01
_STORE_PREFIX = "sqrtdk/ranks"
_CLOSED = "closed by peer"


class RanksError(ModelError):
    """A rank raised, or did not arrive: every rank of the job raises this with the same text."""


class _Meetings:
    """Number of times that the ranks met in this process. Keys of one meeting are not those of another."""

    count = 0


@dataclass(slots=True)
class RankGroup:
    """All ranks of the default process group.

    Attributes:
        rank: This process's number.
        size: Number of ranks.
        seconds: Time that a rank waits for the others.
        together: Whether every rank is known to take part, so that an error here is announced to the others.
    """

    rank: int
    size: int
    seconds: float = WAIT_SECONDS
    together: bool = False

    def gather(self, own: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks. Every rank must call this equally often.

        Args:
            own: This rank's value, which must be picklable.

        Raises:
            RanksError: On every rank: one of them raised within `shared_errors`, or did not arrive in time.
        """
        self.together = True
        every: list[Any] = [None] * self.size
        try:
            self._arrive()
            dist.all_gather_object(every, own)
        except (*INTERRUPTS, RanksError):
            raise
        except Exception as error:
            raise self._gone(error) from error
        finally:
            _Meetings.count += 1
        return every

    def first_says(self, ask: Callable[[], Answer]) -> Answer:
        """Call a function on rank 0 only, and return its result on all ranks. Every rank must call this.

        Args:
            ask: Function without arguments; its result must be picklable.

        Raises:
            RanksError: On every rank: the function raised.
        """
        with self.shared_errors():
            answer = ask() if self.rank == 0 else None
            return self.gather(answer)[0]  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Announce an exception of the block to the other ranks, which then raise it where they wait for this one.

        The first error counts: what a rank raises because another one left says nothing new.
        """
        try:
            yield
        except (*INTERRUPTS, RanksError):
            raise
        except Exception as error:
            if not self.together:
                raise
            told = self._announced(error)
            _Meetings.count += 1
            raise told from error

    def _key(self, name: str) -> str:
        return f"{_STORE_PREFIX}/{_Meetings.count}/{name}"

    def _arrive(self) -> None:
        """Wait until all ranks are here, or raise what one of them says."""
        store, until = _store(), time.monotonic() + self.seconds
        store.set(self._key(str(self.rank)), "here")
        while True:
            if store.check([self._key("error")]):  # also where this rank arrives after the others gave up
                raise _error_of(store.get(self._key("error")))
            if store.check([self._key(str(rank)) for rank in range(self.size)]):
                return
            if time.monotonic() > until:
                late = [rank for rank in range(self.size) if not store.check([self._key(str(rank))])]
                raise self._announced(None, late)
            time.sleep(_POLL_SECONDS)

    def _announced(self, error: Exception | None, late: list[int] | None = None) -> RanksError:
        """Return the error that all ranks raise: the first that was announced, which may be this one."""
        if error is None:
            told: dict[str, Any] = {"late": late, "seconds": self.seconds}
        else:
            text = said_by(error) if isinstance(error, SqrtdkError) else kind_and_text(error)
            hint = error.hint if isinstance(error, SqrtdkError) else ""
            if _CLOSED in text:  # gloo's words where a process ended
                text, hint = Message("errors.ranks.left"), Message("errors.hint.ranks_gone")
            told = {"rank": self.rank, "size": self.size, "text": str(text), "hint": str(hint)}
        said = json.dumps(told).encode()
        try:
            store = _store()
            if store.add(self._key("errors"), 1) == 1:
                store.set(self._key("error"), said)
            else:
                store.wait([self._key("error")], timedelta(seconds=self.seconds))
                said = store.get(self._key("error"))
        except RuntimeError:
            pass  # the store went with the rank that held it: nobody hears this
        return _error_of(said)

    def _gone(self, error: Exception) -> RanksError:
        return RanksError(
            Message("errors.ranks.gone", size=self.size, error=kind_and_text(error, 160)),
            hint=Message("errors.hint.ranks_gone"),
        )


def world(seconds: float = WAIT_SECONDS) -> RankGroup | None:
    """Return all ranks of the default process group, or None where this process is alone.

    Args:
        seconds: Time that a rank waits for the others.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return RankGroup(dist.get_rank(), dist.get_world_size(), seconds)


@contextlib.contextmanager
def started(seconds: float = WAIT_SECONDS) -> Iterator[RankGroup | None]:
    """Join the ranks that torchrun started, unless that is done, and leave them at the end.

    The environment names them: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without these this process is alone.

    Args:
        seconds: Time that a rank waits for the others; also that of each collective of the model.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_available() or dist.is_initialized() or "RANK" not in os.environ or size in ("", "1"):
        yield world(seconds)
        return
    if accelerator() is not None:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(timeout=timedelta(seconds=seconds))  # gloo for the CPU, the device's own for the rest
    try:
        yield world(seconds)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _error_of(said: bytes) -> RanksError:
    told = json.loads(said)
    if "late" in told:
        ranks = ", ".join(map(str, told["late"]))
        return RanksError(
            Message("errors.ranks.late", ranks=ranks, seconds=f"{told['seconds']:g}"),
            hint=Message("errors.hint.ranks_late"),
        )
    text = Message("errors.ranks.raised", rank=told["rank"], size=told["size"], text=told["text"])
    return RanksError(text, hint=told["hint"])
