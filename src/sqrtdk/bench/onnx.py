"""onnxruntime's attention: a model of one node, made in memory, run on the CPU.

Which of its operators computes a case is a matter of what they take; of those that do, the one that needs least:

- GroupQueryAttention: as many queries as keys. For causal cases and shared key heads.
- MultiHeadAttention: float32 and unshared heads; its kernel for many queries holds no L x S matrix.
- Attention, of ONNX itself since opset 23: all others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.bench.peers import Call
from sqrtdk.bench.workloads import Case, Workload
from sqrtdk.errors import UnsupportedError

OPSET, IR = 23, 11  # the first opset with an Attention, and a version of the file format that has it
TYPES = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}


def operator(workload: Workload, dtype: torch.dtype) -> str:
    """Which operator computes a workload.

    Example:
        >>> from sqrtdk.bench.workloads import WORKLOADS
        >>> [operator(WORKLOADS[name], torch.float32) for name in ("training", "gqa", "decode")]
        ['MultiHeadAttention', 'GroupQueryAttention', 'Attention']
    """
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
    runtime = _extras.load("onnxruntime", "bench")
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
    proto = _extras.load("onnx", "bench")
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
