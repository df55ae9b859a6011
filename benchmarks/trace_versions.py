"""What a trace costs in two versions of the code, in one run: time of a traced forward pass or check, largest memory.

Each version runs in a process of its own, which does nothing while it is not its turn; both have the same model (the
shape of GPT-2 small, random weights; a tiny one with `--tiny`) and the same ids. Half of the rounds run the first
version first, half the second. With `--check` the whole of `sqrtdk check` without its laws. Prints seconds and the
ratio second / first, the median with the spread between the 10th and 90th percentile of the rounds.

    git worktree add /tmp/before COMMIT
    python benchmarks/trace_versions.py /tmp/before/src src [--repeats 9] [--tokens 512] [--threads 2] \
        [--check] [--tiny]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial

from timing import Spread, ratio, rounds

KINDS = ("sdpa", "eager")
CHILD = """
import resource, sys, torch, transformers, sqrtdk
tokens, threads, check, tiny = map(int, sys.argv[1:5])
torch.set_num_threads(threads)
torch.manual_seed(0)
config = dict(vocab_size=50257, n_positions=1024, use_cache=False)
if tiny:
    config |= dict(vocab_size=512, n_layer=2, n_embd=64, n_head=4)
layers = config.get("n_layer", 12)
models = {
    kind: transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, attn_implementation=kind)).eval()
    for kind in sys.argv[5:]
}
ids = torch.randint(0, config["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
for line in sys.stdin:
    model = models[line.strip()]
    if check:
        calls = [judged.call for judged in sqrtdk.check(model, {"input_ids": ids}, laws="none").calls]
    else:
        with torch.no_grad(), sqrtdk.trace(model) as run:
            model(input_ids=ids)
        calls = run.calls
    assert len(calls) == layers and all(call.stats is not None for call in calls)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)
"""


def start(source: str, numbers: list[str]) -> subprocess.Popen[str]:
    """A process with the package of a source directory."""
    environment = os.environ | {"PYTHONPATH": os.path.abspath(source), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHILD, *numbers, *KINDS]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def main() -> None:
    """Run both versions in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", help="source directory of one version")
    parser.add_argument("second", help="of the other")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="time `sqrtdk.check` in place of a traced forward pass")
    parser.add_argument("--tiny", action="store_true", help="a model of 2 layers with 64 channels")
    options = parser.parse_args()
    numbers = [str(int(n)) for n in (options.tokens, options.threads, options.check, options.tiny)]
    children = {name: start(getattr(options, name), numbers) for name in ("first", "second")}
    peaks = dict.fromkeys(children, 0)

    def run(name: str, kind: str) -> None:
        child = children[name]
        assert child.stdin is not None
        assert child.stdout is not None
        print(kind, file=child.stdin, flush=True)
        peaks[name] = int(child.stdout.readline())

    ways = {f"{name} {kind}": partial(run, name, kind) for kind in KINDS for name in children}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for order in (ways, dict(reversed(ways.items()))):  # whichever runs second is favoured
        for name, seconds in rounds(order, options.repeats).items():
            times[name] += seconds
    for kind in KINDS:
        first, second = times[f"first {kind}"], times[f"second {kind}"]
        print(f"{kind:6s} first {Spread.of(first).text()} s, second {Spread.of(second).text()} s,", end=" ")
        print(f"second / first {ratio(second, first).text()}")
    print(f"memory first {peaks['first'] / 1024:.0f} MiB, second {peaks['second'] / 1024:.0f} MiB")
    for child in children.values():
        assert child.stdin is not None
        child.stdin.close()
        child.wait()


if __name__ == "__main__":
    main()
