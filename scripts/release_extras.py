"""What each extra is for, as a program that a clean environment with this extra alone has to run.

A program ends with an error if the extra brings too little. It does what a user would do, and reads from the disk what
was written there. It runs in an empty directory, and asks nothing of the network; its argument is the repository, of
which `docs` builds the pages. The extras `test` and `dev` are ours: `make test` runs in them.
"""

from __future__ import annotations

import re
from pathlib import Path

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
_RUN = """
import subprocess, sys
from pathlib import Path

def run(*arguments, code=0):
    command = [sys.executable, "-m", "sqrtdk", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == code, (arguments, done.returncode, done.stdout[-1000:], done.stderr[-3000:])
    return done.stdout + done.stderr
"""
_READ = """
from sqrtdk.monitor.reading import read_run
assert len(read_run("run").steps) == 3, read_run("run")
run("watch", "show", "run", "--html", "run.html")
assert "</html>" in Path("run.html").read_text(encoding="utf-8")
"""
# What each logger wrote, by its own reader where it has one: the same name at each of the three steps.
_TENSORBOARD_READ = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
scalars = EventAccumulator("events").Reload().Scalars("attention/calls")
assert [scalar.step for scalar in scalars] == [1, 2, 3], scalars
"""
_WANDB_READ = """
import wandb
from pathlib import Path
wandb.teardown()  # its process writes on a while after a run was finished
[file] = Path("wandb").glob("offline-run-*/*.wandb")
assert file.read_bytes().count(b"attention/calls") >= 3, file
"""
_MLFLOW_READ = """
import mlflow
client = mlflow.MlflowClient(tracking_uri="sqlite:///runs.db")
[run] = client.search_runs([client.get_experiment_by_name("attention").experiment_id])
steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "attention/calls")]
assert run.info.status == "FINISHED" and steps == [1, 2, 3], (run.info.status, steps)
"""
_TRACKIO_HERE = """
import os
os.environ["TRACKIO_DIR"] = os.path.abspath("trackio")
"""
_TRACKIO_READ = """
from trackio.sqlite_storage import SQLiteStorage
[name] = SQLiteStorage.get_runs("project")
rows = [row["step"] for row in SQLiteStorage.get_logs("project", name) if "attention/calls" in row]
assert rows == [1, 2, 3] and any(file.is_file() for file in __import__("pathlib").Path("trackio").rglob("*.db")), rows
"""
_SWANLAB_READ = """
from pathlib import Path
[file] = Path("runs").glob("run-*/*.swanlab")
assert file.read_bytes().count(b"attention/calls") >= 3, file
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
import torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained("llama")

import sqrtdk
report = sqrtdk.check("llama")
assert len(report.calls) == 2 and not report.findings, report.findings
assert "\u001b" not in run("check", "llama", "--attn", "both", "--html", "llama.html")
assert "</html>" in Path("llama.html").read_text(encoding="utf-8")
run("diff", "llama", "llama")

import sqrtdk.integrations.transformers as ours
from transformers import AutoModelForCausalLM
ours.register()
ids = torch.arange(1, 20)[None]
theirs, own = (
    AutoModelForCausalLM.from_pretrained("llama", attn_implementation=name)(ids).logits for name in ("sdpa", "sqrtdk")
)
assert torch.allclose(theirs, own, atol=1e-5), (theirs - own).abs().max()
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

import sys, torch
from safetensors.torch import save_file
save_file({"x": torch.randn(2, 5, 8)}, "x.safetensors")
report = sqrtdk.check("attention.onnx", input_file="x.safetensors")
assert report.calls[0].verdict == "exact" and "onnxruntime" in sys.modules, report
"""
_LIGHTNING = """
import json, lightning
from sqrtdk.integrations.lightning import AttentionWatch

class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, number):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

callback = AttentionWatch(every=1, sinks=["jsonl:attention.jsonl"])
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
loader = torch.utils.data.DataLoader(torch.randn(6, 5, 16), batch_size=2)
lightning.Trainer(max_epochs=1, callbacks=[callback], **quiet).fit(Training(), loader)
assert [sample.step for sample in callback.watch.samples] == [1, 2, 3]
lines = [json.loads(line) for line in open("attention.jsonl", encoding="utf-8")]
assert [line["step"] for line in lines if "metrics" in line] == [1, 2, 3], lines
"""
_RAY = """
from sqrtdk.engines import ray

def verdict(seed):
    torch.manual_seed(seed)
    return sqrtdk.check(Attention(), x).calls[0].verdict

with ray(1) as engine:
    assert sorted(engine.results(verdict, [1, 2])) == [(0, "exact"), (1, "exact")]
"""
_SERVER = """
import json, threading, torch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

torch.manual_seed(0)
embed, head = torch.randn(128, 16), torch.randn(16, 128)
places = torch.randn(1024, 16)

def answer(asked):
    ids = list(asked["prompt"].encode())
    for _ in range(asked["max_tokens"]):
        x = (embed[ids] + places[: len(ids)])[None]
        x = x + torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        rows = (x[0] @ head).double().log_softmax(-1)
        ids.append(int(rows[-1].argmax()))
    made = [None, *({chr(token): row[token].item() for token in row.topk(asked["logprobs"]).indices} for row in rows)]
    begin = 0 if asked.get("echo") else len(asked["prompt"])
    told = {"tokens": [chr(token) for token in ids[begin:]], "top_logprobs": made[begin:]}
    return {"choices": [{"logprobs": told}], "usage": {"prompt_tokens": len(asked["prompt"])}}

class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = json.dumps(answer(asked)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words):
        pass

served = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=served.serve_forever, daemon=True).start()
said = run("check", f"http://127.0.0.1:{served.server_port}/v1", "--server-characters", "100")
assert "0 broken" in said and "prefix" in said, said
"""
_GGML = """
import gguf, torch

width, heads, words = 64, 4, 96
file = gguf.GGUFWriter("model.gguf", "llama")
file.add_tokenizer_model("no_vocab")
file.add_vocab_size(words)
file.add_context_length(512)
file.add_embedding_length(width)
file.add_feed_forward_length(128)
file.add_block_count(1)
file.add_head_count(heads)
file.add_head_count_kv(2)
file.add_layer_norm_rms_eps(1e-6)
file.add_rope_freq_base(10000.0)
shapes = {"token_embd": (words, width), "output": (words, width), "output_norm": (width,)}
shapes |= {f"blk.0.{name}_norm": (width,) for name in ("attn", "ffn")}
shapes |= {"blk.0.attn_q": (width, width), "blk.0.attn_output": (width, width)}
shapes |= {f"blk.0.attn_{name}": (width // 2, width) for name in "kv"}
shapes |= {f"blk.0.ffn_{name}": (128, width) for name in ("gate", "up")} | {"blk.0.ffn_down": (width, 128)}
for name, shape in shapes.items():
    tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[-1] ** -0.5
    file.add_tensor(f"{name}.weight", tensor.numpy())
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()
run("check", "model.gguf", "--run", "--html", "model.html")
assert "</html>" in Path("model.html").read_text(encoding="utf-8")
"""
_LAB = """
assert "grad-norm" in run("lab", "list")
run("lab", "run", "grad-norm", "--quick", "--output", "records")
assert [file for file in Path("records").rglob("*") if file.is_file()], "no records"
run("lab", "sweep", "--output", "sweep", "--d-k", "16", "--keys", "16", "--seeds", "1", "--rows", "32")
"""
_APP = """
import urllib.request
command = [sys.executable, "-u", "-m", "sqrtdk", "app", "--port", "0"]
served = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    address = next(word for line in served.stderr for word in line.split() if word.startswith("http://"))
    with urllib.request.urlopen(address.rstrip(".")) as page:
        text = page.read().decode()
    assert page.status == 200 and "gradio" in text, text[:1000]
finally:
    served.terminate()
    served.wait()
"""
_DOCS = """
command = [sys.executable, sys.argv[1] + "/docs/site/build.py", "pages"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stderr[-3000:]
assert all(Path("pages", tree, "index.html").exists() for tree in ("en", "zh")), list(Path("pages").iterdir())
"""


def _watched(options: str, after: str = "") -> str:
    return _MODEL + _WATCHED.replace("{options}", options) + after


PROGRAMS = {
    "hf": _RUN + _HF,
    "watch": _RUN + _watched('to="run"', _READ),
    "tensorboard": _watched('sinks=["tensorboard:events"]', _TENSORBOARD_READ),
    "wandb": _watched('sinks=["wandb:project"]', _WANDB_READ),
    "mlflow": _watched('sinks=["mlflow:sqlite:///runs.db"]', _MLFLOW_READ),
    "trackio": _TRACKIO_HERE + _watched('sinks=["trackio:project"]', _TRACKIO_READ),
    "swanlab": _watched('sinks=["swanlab:runs"]', _SWANLAB_READ),
    "lightning": _MODEL + _LIGHTNING,
    "ray": _MODEL + _RAY,
    "onnx": _ONNX,
    "jax": _MODEL + _JAX + _PORTED,
    "mlx": _MODEL + _MLX + _PORTED,
    "server": _RUN + _SERVER,
    "ggml": _RUN + _GGML,
    "lab": _RUN + _LAB,
    "app": _RUN + _LAB + _APP,
    "docs": _RUN + _DOCS,
}
TOGETHER = {"docs": "docs,lab"}  # what an extra is tried with: the documentation has the lab's explorer
_MAKEFILE = (Path(__file__).resolve().parents[1] / "Makefile").read_text(encoding="utf-8")
# Of the environment in which pip installs an extra: llama.cpp is built from source, as for the tests.
VARIABLES = {"ggml": {"CMAKE_ARGS": re.findall(r"^LLAMA_CPP_FLAGS := (.+)$", _MAKEFILE, re.MULTILINE)[0]}}
