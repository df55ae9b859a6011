"""Who else computes attention: torch's own operations, the formula written out, and onnxruntime.

onnxruntime runs a model of one node, made in memory, on the CPU. Its operator is the one that needs least of those that
take the case:

- GroupQueryAttention: as many queries as keys. For causal cases and shared key heads.
- MultiHeadAttention: float32 and unshared heads; its kernel for many queries holds no L x S matrix.
- Attention, of ONNX itself since opset 23: all others.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk._subclasses import torch_attention
from sqrtdk.errors import UnsupportedError
from workloads import Case, Workload

Call = Callable[[], Tensor]
LARGEST_EAGER = 2**28  # weights of the formula written out
OPSET, IR = 23, 11  # the first opset with an Attention, and a version of the file format that has it
TYPES = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}


def sdpa(case: Case) -> Call:
    """Torch's scaled_dot_product_attention."""
    causal, shared = case.workload.is_causal, case.workload.grouped
    return lambda: torch_attention(*case.inputs, is_causal=causal, enable_gqa=shared)


def flex(case: Case) -> Call:
    """Torch's FlexAttention, compiled for this shape alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    workload = case.workload
    with warnings.catch_warnings():  # of torch's own code, and that this call is not compiled
        warnings.simplefilter("ignore")
        query, key, value = (tensor[:, :1, :1] for tensor in case.inputs)
        flex_attention(query, key, value)  # refuses gradients in words of its own, which the compiler would hide
    mask = None
    if workload.is_causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, workload.length, workload.keys, device="cpu")
    torch._dynamo.reset()  # after a few shapes torch would stop compiling, and say so in a log only
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def call() -> Tensor:
        found: Tensor = compiled(*case.inputs, block_mask=mask, enable_gqa=workload.grouped)
        return found

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        call()
    return call


def eager(case: Case) -> Call:
    """The formula, written out.

    Raises:
        UnsupportedError: it would hold more than 2^28 weights.
    """
    hidden = _hidden(case)
    return lambda: _logits(case, hidden).softmax(-1) @ _grown(case.value, case)


def eager_statistics(case: Case) -> Call:
    """The formula with the statistics of every row beside it.

    Raises:
        UnsupportedError: it would hold more than 2^28 weights.
    """
    hidden = _hidden(case)

    def call() -> Tensor:
        return dense_statistics(_logits(case, hidden), _grown(case.value, case), hidden)[0]

    return call


def dense_statistics(logits: Tensor, value: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, ...]:
    """Output and row statistics as a careful user writes them, with the L x S matrix.

    Args:
        logits: (B, H, L, S), -inf where a key is hidden.
        value: (B, H, S, Ev).
        hidden: (L, S), True where a key is hidden; None: all are visible.

    Returns:
        Output (B, H, L, Ev) of the value's dtype; then, float32 and (B, H, L), lse, largest and smallest logit, mean,
        variance, entropy in nats, sum p^2, largest p, and Frobenius norm of the softmax Jacobian.
    """
    z = logits.float()
    lse, largest, smallest = z.logsumexp(-1), z.amax(-1), z.amin(-1)
    p = (z - lse[..., None]).exp()
    square = p.square()
    collision, cubes = square.sum(-1), (square * p).sum(-1)
    jacobian = (collision - 2 * cubes + collision.square()).clamp_min(0).sqrt()
    if hidden is None:
        variance, mean = torch.var_mean(z, -1, correction=0)
    else:
        smallest, count = z.masked_fill(hidden, math.inf).amin(-1), (~hidden).sum(-1)
        z = z.masked_fill(hidden, 0.0)
        mean = z.sum(-1) / count
        variance = (z - mean[..., None]).masked_fill(hidden, 0.0).square().sum(-1) / count
    entropy = lse - (p * z).sum(-1)
    output = p.to(value.dtype) @ value
    return output, lse, largest, smallest, mean, variance, entropy, collision, p.amax(-1), jacobian


def _hidden(case: Case) -> Tensor | None:
    """The causal mask where there is one, for a case that the formula can hold."""
    workload = case.workload
    if workload.pairs > LARGEST_EAGER:
        raise UnsupportedError(f"it would hold {workload.pairs} weights, more than {LARGEST_EAGER}")
    if not workload.is_causal:
        return None
    return torch.ones(workload.length, workload.keys, dtype=torch.bool).triu(1)


def _logits(case: Case, hidden: Tensor | None) -> Tensor:
    z: Tensor = case.query @ _grown(case.key, case).mT * case.workload.width**-0.5
    return z if hidden is None else z.masked_fill(hidden, -math.inf)


def _grown(tensor: Tensor, case: Case) -> Tensor:
    """Key or value with a head for each of the query's."""
    group = case.workload.heads // case.workload.key_heads
    return tensor if group == 1 else tensor.repeat_interleave(group, 1)


def operator(workload: Workload, dtype: torch.dtype) -> str:
    """Which operator computes a workload."""
    if (workload.is_causal or workload.grouped) and workload.length == workload.keys:
        return "GroupQueryAttention"
    if workload.length > 1 and not workload.grouped and not workload.is_causal and dtype == torch.float32:
        return "MultiHeadAttention"
    return "Attention"


def onnxruntime(case: Case) -> Call:
    """One run of the model, on torch's memory and with torch's number of threads.

    Raises:
        MissingExtraError: onnxruntime or onnx is not installed.
        UnsupportedError: the case has a backward pass.
    """
    runtime = _extras.load_extra("onnxruntime", "onnx")
    if case.training:
        raise UnsupportedError("onnxruntime runs inference only")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # an error is raised all the same
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # its threads would disturb the next way
    kind = operator(case.workload, case.query.dtype)
    session = runtime.InferenceSession(_model(case, kind), options, providers=["CPUExecutionProvider"])
    flat = kind != "Attention"  # these take (B, L, H E)
    tensors = [tensor.transpose(1, 2).flatten(2).contiguous() if flat else tensor for tensor in case.inputs]
    given = {name: tensor.numpy() for name, tensor in zip(("query", "key", "value"), tensors, strict=True)}
    if kind == "GroupQueryAttention":
        workload = case.workload
        given["last"] = np.full(workload.batch, workload.keys - 1, np.int32)
        given["total"] = np.array([workload.keys], np.int32)

    def call() -> Tensor:
        output = torch.from_numpy(session.run(["output"], given)[0])
        if flat:
            output = output.view(*output.shape[:2], case.workload.heads, -1).transpose(1, 2)
        return output

    return call


def _model(case: Case, kind: str) -> bytes:
    proto = _extras.load_extra("onnx", "onnx")
    helper, types = proto.helper, proto.TensorProto
    workload = case.workload
    element = getattr(types, TYPES[case.query.dtype])
    inputs = {"query": element, "key": element, "value": element}
    outputs = {"output": element}
    attributes: dict[str, Any] = {"domain": "com.microsoft", "num_heads": workload.heads}
    names = list(inputs)
    if kind == "GroupQueryAttention":
        names += ["", "", "last", "total"]  # no past keys and values
        inputs |= {"last": types.INT32, "total": types.INT32}
        outputs |= {"present_key": element, "present_value": element}
        attributes["kv_num_heads"] = workload.key_heads
        if not workload.is_causal:  # an attribute that older versions do not know, and whose default is 1
            attributes["causal"] = 0
    elif kind == "Attention":
        attributes = {"is_causal": int(workload.is_causal)}
    node = helper.make_node(kind, names, list(outputs), **attributes)

    def values(of: dict[str, int]) -> list[Any]:
        return [helper.make_tensor_value_info(name, dtype, None) for name, dtype in of.items()]

    graph = helper.make_graph([node], "attention", values(inputs), values(outputs))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=IR).SerializeToString()
    return made
