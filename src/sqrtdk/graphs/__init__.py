"""Reads the attention tensors of exported graphs: ONNX files and torch.export programs."""

from sqrtdk.graphs.graph import UnreadAttention as UnreadAttention
from sqrtdk.graphs.onnx import GraphRun as GraphRun
from sqrtdk.graphs.onnx import read_onnx as read_onnx
from sqrtdk.graphs.program import read_exported as read_exported
