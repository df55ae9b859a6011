"""What autograd delivers to the parameters on the way to an attention's logits and values (`learned_path`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from sqrtdk.laws.backward.case import OF_LEARNED, Backward, Fault, Judged, Learned
from sqrtdk.laws.backward.graph import graph_place, nodes_behind
from sqrtdk.laws.backward.handles import Edge, Reached, edge_of, key_of
from sqrtdk.laws.backward.learned_path import LearnedPath
from sqrtdk.laws.backward.passes import cotangents_of

_WHOLE_DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True, eq=False)
class LearnedParameters:
    """The parameters of an attention that train and are no operands themselves.

    Attributes:
        reached: The attention.
        path: Their way; None without one.
        judged: Those whose gradient is judged, by name.
        shared: Names of those that are not: before the product and read by several attentions, or under autocast.
    """

    reached: Reached
    path: LearnedPath | None
    judged: Mapping[str, Tensor]
    shared: tuple[str, ...]

    @classmethod
    def of(
        cls, reached: Reached, edges: Mapping[str, Edge], parameters: Mapping[str, nn.Parameter],
        readers: Mapping[str, int],
    ) -> LearnedParameters:  # fmt: skip
        """Return the parameters of an attention.

        In half precision none is judged: roundings are as large as most faults. Of a model in half precision the
        float32 copy is asked too.

        Args:
            reached: The attention.
            edges: Places of its operands by name, among which a parameter may be.
            parameters: Parameters of the model by name.
            readers: How many attentions have each parameter on their way.
        """
        path, whole = reached.learned, reached.call.dtype in _WHOLE_DTYPES
        known = {key_of(edge) for edge in edges.values()}
        sinks = next(
            (term.value for term in reached.call.terms or () if term.name == "sinks" and "sinks" in edges), None
        )
        trained = [] if path is None else [n for n in path.parameters if n in parameters]
        names = [
            name for name in trained
            if (x := parameters[name]).requires_grad and key_of(edge_of(x)) not in known and not _holds(x, sinks)
        ]  # fmt: skip
        if not whole:  # autocast
            wide = (torch.float32, torch.float64)
            return cls(reached, None, {}, tuple(name for name in names if parameters[name].dtype in wide))
        shared = tuple(name for name in names if path is not None and name in path.before and readers[name] > 1)
        return cls(reached, path, {name: parameters[name] for name in names if name not in shared}, shared)

    def formula(self) -> Learned | None:
        """Return the function that gives their gradients from those of the formula; None if there are none."""
        return partial(self.path.gradients, self.judged) if self.path is not None and self.judged else None

    def beside(self, give: Backward) -> Backward:
        """Return a function that gives their gradients, "learned NAME", beside those that `give` gives."""

        def both(d_out: Tensor, d_lse: Tensor | None, strided: bool) -> dict[str, Tensor | None]:
            return {**give(d_out, d_lse, strided), **self._delivered(d_out, d_lse, strided)}

        return both if self.judged else give

    def _delivered(self, d_out: Tensor, d_lse: Tensor | None, strided: bool) -> dict[str, Tensor | None]:
        """Return what comes from this attention alone: an earlier one may read the same table of a bias."""
        assert self.path is not None
        outputs, cotangents = cotangents_of(self.reached, d_out, d_lse, strided)
        places = [one.edge for one in self.reached.handles.values() if isinstance(one.edge, GradientEdge)]
        found: dict[str, Tensor | None] = {}
        for stops, names in (
            (places, [name for name in self.judged if name not in self.path.before]),
            ([], [name for name in self.judged if name in self.path.before]),
        ):
            if not names:
                continue
            hooks = [place.node.register_prehook(_stop_at(place.output_nr)) for place in stops]
            try:
                with torch.enable_grad():
                    given = torch.autograd.grad(
                        outputs, [self.judged[name] for name in names], cotangents,  # type: ignore[arg-type]
                        retain_graph=True, allow_unused=True,
                    )  # fmt: skip
            finally:
                for hook in hooks:
                    hook.remove()
            found |= {f"{OF_LEARNED}{name}": one for name, one in zip(names, given, strict=True)}
        return found

    def cut_off(self, parameters: Mapping[str, nn.Parameter]) -> list[Fault]:
        """Return the projections of a bias that train and that the output does not reach, as faults.

        Args:
            parameters: Parameters of the model by name.
        """
        if self.path is None or self.reached.output is None:
            return []
        behind = nodes_behind(graph_place(self.reached.output.edge).node)
        call = self.reached.call
        own = {one.projection.name for one in (call.query, call.key, call.value) if one.projection is not None}
        names = [name for name in sorted(self.path.projections - own) if name in parameters]
        trained = [name for name in names if parameters[name].requires_grad]
        return [Fault((f"{OF_LEARNED}{n}",), "none") for n in trained if graph_place(parameters[n]).node not in behind]

    def unjudged(self, result: Judged) -> list[str]:
        """Return the names of the parameters on the way that were not judged."""
        looked = {*result.kept, *(name for fault in result.faults for name in fault.operands)}
        return [*self.shared, *(name for name in self.judged if f"{OF_LEARNED}{name}" not in looked)]


def _holds(parameter: Tensor, values: Tensor | float | None) -> bool:
    """Return whether a parameter has the values, in any shape."""
    plain = parameter.detach().flatten().to(torch.float64)
    return isinstance(values, Tensor) and plain.shape == values.shape and torch.allclose(plain, values, 1e-4, 1e-6)


def _stop_at(number: int) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
    def stopped(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.zeros_like(x) if place == number and x is not None else x for place, x in enumerate(gradients)
        )

    return stopped
