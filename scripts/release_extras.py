"""What each extra is for, as a program that a clean environment with this extra alone has to run.

A program ends with an error if the extra brings too little. It runs in an empty directory, and asks nothing of the
network. The extras `lab` and `app` are tried by their commands (release_check.py); `docs`, `test` and `dev` are ours.
"""

from __future__ import annotations

_MODEL = """
import torch, sqrtdk

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

model, x = Attention(), torch.randn(2, 5, 16)
"""
_WATCHED = """
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with sqrtdk.watch(model, every=1, {options}) as watch:
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        watch.step(loss)
assert [sample.step for sample in watch.samples] == [1, 2, 3]
assert not watch.alarms, watch.alarms
"""
_READ = """
from sqrtdk.monitor.reading import read_run
assert len(read_run("run").steps) == 3, read_run("run")
"""
_PORTED = """
names = ("q", "k", "v")
arrays = {name: convert(getattr(model, name).weight.detach().T.contiguous().numpy()) for name in names}

def port(p, x):
    q, k, v = (x @ p[name] for name in names)
    return softmax(q @ k.swapaxes(-1, -2) / 4.0, axis=-1) @ v

[call] = sqrtdk.check(read(port, arrays, convert(x.numpy())), x).calls
assert call.verdict == "exact", call.verdict
"""
_JAX = """
import jax, jax.numpy
from sqrtdk.frontends import from_jax as read
convert, softmax = jax.numpy.asarray, jax.nn.softmax
"""
_MLX = """
import mlx.core
from sqrtdk.frontends import from_mlx as read
convert, softmax = mlx.core.array, mlx.core.softmax
"""
_HF = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained("llama")

import sqrtdk
report = sqrtdk.check("llama")
assert len(report.calls) == 2 and not report.findings, report.findings
"""
_ONNX = """
import numpy, onnx, sqrtdk
from onnx import helper
constants = {f"w{name}": numpy.random.randn(8, 8).astype("float32") for name in "qkv"}
constants["scale"] = numpy.float32(8**-0.5)
nodes = [
    *(helper.make_node("MatMul", ["x", f"w{name}"], [name]) for name in "qkv"),
    helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
    helper.make_node("MatMul", ["q", "kt"], ["product"]),
    helper.make_node("Mul", ["product", "scale"], ["scaled"]),
    helper.make_node("Softmax", ["scaled"], ["weights"], axis=-1),
    helper.make_node("MatMul", ["weights", "v"], ["y"]),
]
given, made = (
    helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 5, 8]) for name in "xy"
)
tensors = [onnx.numpy_helper.from_array(numpy.asarray(array), name) for name, array in constants.items()]
graph = helper.make_graph(nodes, "attention", [given], [made], tensors)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), "attention.onnx")
[call] = sqrtdk.check("attention.onnx").calls
assert call.verdict == "exact", call.verdict
"""
_LIGHTNING = """
import lightning
from sqrtdk.integrations.lightning import AttentionWatch

class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, number):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

callback = AttentionWatch(every=1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
loader = torch.utils.data.DataLoader(torch.randn(6, 5, 16), batch_size=2)
lightning.Trainer(max_epochs=1, callbacks=[callback], **quiet).fit(Training(), loader)
assert [sample.step for sample in callback.watch.samples] == [1, 2, 3]
"""
_RAY = """
import math
from sqrtdk.engines import ray
with ray(1) as engine:
    assert sorted(engine.results(math.sqrt, [4.0, 9.0])) == [(0, 2.0), (1, 3.0)]
"""
_SERVER = """
import subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

class Busy(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_error(503)

asked, served = [], HTTPServer(("127.0.0.1", 0), Busy)
threading.Thread(target=served.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{served.server_port}/v1"
done = subprocess.run([sys.executable, "-m", "sqrtdk", "check", address], capture_output=True, text=True)
assert done.returncode == 2 and "503" in done.stderr and asked, done.stderr
"""


def _watched(options: str, after: str = "") -> str:
    return _MODEL + _WATCHED.replace("{options}", options) + after


PROGRAMS = {
    "hf": _HF,
    "watch": _watched('to="run"', _READ),
    "tensorboard": _watched('sinks=["tensorboard:events"]'),
    "wandb": _watched('sinks=["wandb:project"]'),
    "mlflow": _watched('sinks=["mlflow:sqlite:///runs.db"]'),
    "trackio": _watched('sinks=["trackio:project"]'),
    "swanlab": _watched('sinks=["swanlab:runs"]'),
    "lightning": _MODEL + _LIGHTNING,
    "ray": _RAY,
    "onnx": _ONNX,
    "jax": _MODEL + _JAX + _PORTED,
    "mlx": _MODEL + _MLX + _PORTED,
    "server": _SERVER,
}
