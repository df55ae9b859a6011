"""Train one variant of the embedded model on the text of Python's standard library.

Every variant gets the same seed, initial weights, batches, steps and learning rate; only the scale differs:

    for v in demo demo:unscaled demo:twice demo:inverted; do python scripts/train_demo.py --variant $v; done

Writes `<variant>.safetensors` (float16) and `<variant>.json` (losses, seed, versions, command) into
`src/sqrtdk/models/weights`. The held-out loss is that of the stored, rounded weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from sqrtdk.models.demo import VARIANTS, DemoModel, weights_name
from sqrtdk_lab.training.settings import batch, learning_rate, stdlib_text

WEIGHTS = Path(__file__).parents[1] / "src" / "sqrtdk" / "models" / "weights"


def loss_of(model: DemoModel, data: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats a byte."""
    return F.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


@torch.no_grad()
def held_out_loss(model: DemoModel, text: Tensor, length: int) -> float:
    """Mean loss over 16 fixed batches of 16 windows."""
    generator = torch.Generator().manual_seed(1234)
    return sum(loss_of(model, batch(text, 16, length, generator)).item() for _ in range(16)) / 16


def main() -> None:
    """Train, print losses, write weights and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="demo")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = DemoModel(args.variant)
    order = torch.Generator().manual_seed(args.seed)
    train, held_out = stdlib_text()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    curve, started = [], time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr, warm_up=50)
        loss = loss_of(model, batch(train, args.rows, args.length, order))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == args.steps - 1:
            curve.append({"step": step, "loss": round(loss.item(), 4), "gradient_norm": round(norm.item(), 4)})
            print(f"{args.variant} {curve[-1]} {time.monotonic() - started:.0f} s", flush=True)

    stored = {name: p.detach().half().contiguous() for name, p in model.named_parameters()}
    model.load_state_dict({name: p.float() for name, p in stored.items()} | {"head.weight": stored["embed.weight"]})
    record = {
        "variant": args.variant,
        "command": f"python scripts/train_demo.py --variant {args.variant} --steps {args.steps} --rows {args.rows}"
        f" --length {args.length} --lr {args.lr} --seed {args.seed}",
        "held_out_loss_nats_per_byte": round(held_out_loss(model, held_out, args.length), 4),
        "train_loss": curve,
        "steps": args.steps,
        "seed": args.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_bytes": len(train),
        "train_sha256": hashlib.sha256(train.numpy().tobytes()).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{weights_name(args.variant)}.safetensors"
    save_file(stored, file)
    file.chmod(0o644)
    (args.out / f"{weights_name(args.variant)}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{args.variant} held out {record['held_out_loss_nats_per_byte']} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
