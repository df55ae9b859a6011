"""Run the tests as other CPUs would: with each setting that makes torch's libraries take the code of another CPU.

Sums run in another order there, exponentials are rounded and random numbers drawn in another way; a tolerance that
holds on this CPU by chance shows itself. What a setting changes is looked at first: what the libraries say of
themselves, and results to the last bit. One that changes nothing on this CPU (oneDNN can be held back, and not raised;
MKL_ENABLE_INSTRUCTIONS is for Intel's) would run the same tests on the same numbers: it is told and not run.

The libraries are set apart from one another, so that a run sets all of them, and there are as many runs as the longest
list has values: every value of every variable, one thread and two, in at least one of them. JOBS workers have these
threads each. Which of the settings of a run that failed it was, the setting alone tells, asked for by its name; so does
one that changes nothing. The compiled attention kernel has the instructions that it was built with under every setting,
and is tested beside torch's.

One line a run, with what failed beneath it; all that pytest said lies in out/portable/. Ends with 1 if any run failed,
after the last. Run: make portable, or python scripts/portable.py avx2 1 for each setting alone that has these words.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "out" / "portable"
THREADS = (1, 2)

SETTINGS = (
    ("ATEN_CPU_CAPABILITY", "default"),  # torch's own loops, without vectors
    ("ATEN_CPU_CAPABILITY", "avx2"),
    ("ONEDNN_MAX_CPU_ISA", "AVX2"),  # products of bfloat16 and float16
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"),
    ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),  # products of float32 and float64, on Intel's CPUs
)
# Run where they are asked for by name.
MORE = (
    ("MKL_CBWR", "COMPATIBLE"),
)  # products of float32 and float64 on any CPU, without vectors of more than 128 bits

# What the CPU's arithmetic does not reach.
LEFT_OUT = {
    "tests/cli": "processes, streams and help texts; the figures that they print are those of audit and lab",
    "tests/report": "draws records that are written down",
    "tests/test_house.py": "text, imports and processes",
    "tests/test_portable.py": "processes",
    "tests/attention/test_attention_kernel_build.py": "a compiler and files",
    "tests/attention/test_attention_kernel_load.py": "a compiler and files",
    "tests/attention/test_attention_kernel_mutants.py": "compiles errors of 0.1% and more, far from any rounding",
    "tests/attention/test_attention_mutants.py": "plants errors of 0.1% and more, far from any rounding",
    "tests/attention/test_attention_kernel_sanitized.py": "addresses, not numbers",
    "tests/attention/test_attention_planted.py": "text",
    "tests/engines/test_engines.py": "processes",
    "tests/engines/test_engines_ray.py": "processes",
    "lab/lab_tests/test_lab_schema.py": "text",
    "lab/lab_tests/test_lab_sweep_cli.py": "processes and streams",
    "lab/lab_tests/test_lab_sweep_damage.py": "files",
    "tests/attention/test_attention_kernel_damage.py": "files",
    "tests/models/test_models_checkpoints.py": "files",
    "tests/models/test_models_hub.py": "names, and a server of texts",
    "tests/models/test_models_limits.py": "files",
    "tests/models/test_models_links.py": "files",
    "tests/models/test_models_load.py": "files",
    "tests/models/test_models_tokenizer.py": "processes",
    "tests/test_changes.py": "text",
    "tests/test_readme.py": "text and processes",
}
# One test among others of its file.
DESELECTED = {
    "lab/lab_tests/test_lab_claims.py::test_verdict_of_the_quick_run_and_of_its_control[amp-scaling]": "an hour of"
    " bfloat16 without instructions for it; lab/lab_tests/test_lab_training.py steps through the same",
}
PROBE = """
import hashlib, torch
draw = torch.Generator().manual_seed(0)
wide = torch.randint(-2048, 2048, (3, 257, 311), generator=draw).double() / 1024
digests = []
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    x, y, z = wide.to(dtype).unbind()
    results = [x @ y.mT, x.exp(), x.softmax(-1), x.sum(-1), torch.nn.functional.scaled_dot_product_attention(x, y, z)]
    digests += [hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for t in results]
print(torch.backends.cpu.get_cpu_capability())
print(hashlib.sha256("".join(digests).encode()).hexdigest())
"""


def environment(threads: int, **setting: str) -> dict[str, str]:
    """This process's, without other settings; idle threads of OpenMP sleep, since workers share the cores."""
    kept = {name: value for name, value in os.environ.items() if name not in {name for name, _ in (*SETTINGS, *MORE)}}
    return kept | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"} | setting


@cache
def in_force(threads: int, **setting: str) -> tuple[str, ...]:
    """What torch says of itself under a setting: ATen's instructions, a digest of results, oneDNN's instructions."""
    variables = environment(threads, **setting, ONEDNN_VERBOSE="1")
    done = subprocess.run([sys.executable, "-c", PROBE], env=variables, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return (*lines[-2:], *(line for line in lines if "cpu,isa:" in line))


def title(setting: dict[str, str], threads: int) -> str:
    """What a run is called."""
    named = (f"{name}={value}" for name, value in setting.items())
    return ", ".join((*named, f"{threads} thread{'s' if threads > 1 else ''}"))


def changes(name: str, value: str) -> bool:
    """Whether a setting changes anything on this CPU."""
    return any(in_force(threads) != in_force(threads, **{name: value}) for threads in THREADS)


def together(settings: Iterable[tuple[str, str]]) -> list[tuple[dict[str, str], int]]:
    """As few runs as have every value of every variable and every number of threads: a short list begins again."""
    values: dict[str, list[str]] = {}
    for name, value in settings:
        values.setdefault(name, []).append(value)
    runs = max((len(THREADS), *map(len, values.values()))) if values else 0
    return [
        ({name: each[run % len(each)] for name, each in values.items()}, THREADS[run % len(THREADS)])
        for run in range(runs)
    ]


def run(setting: dict[str, str], threads: int) -> bool:
    """Run the tests under a setting and print its line; whether all passed."""
    jobs = os.environ.get("JOBS", "2")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not browser"]
    command += [f"--numprocesses={jobs}", *(f"--ignore={path}" for path in LEFT_OUT)]
    command += [f"--deselect={test}" for test in DESELECTED]
    start = time.monotonic()
    log = LOGS / f"{title(setting, threads).replace(', ', '-').replace(' ', '-')}.txt"
    variables = environment(threads, **setting)
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(log.with_suffix(".inductor"))  # its code is that of the instructions
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
    text = log.read_text(encoding="utf-8", errors="replace")
    last = text.rstrip().rsplit("\n", 1)[-1]
    passed, failed, errors, skipped = (
        int(found[1]) if (found := re.search(rf"(\d+) {kind}", last)) else 0
        for kind in ("passed", "failed", "errors?", "skipped")
    )
    ended = done.returncode == 0 and passed > 0
    minutes = (time.monotonic() - start) / 60
    counts = f"{passed} passed, {failed + errors} failed, {skipped} skipped"
    print(f"{'ok     ' if ended else 'FAILED '} {title(setting, threads)}: {counts}, {minutes:.1f} min", flush=True)
    if not ended:
        print("".join(f"        {line}\n" for line in re.findall(r"^(?:FAILED|ERROR) .*", text, re.MULTILINE)), end="")
        print(f"        pytest ended with {done.returncode}; all it said: {log.relative_to(ROOT)}", flush=True)
    return ended


def asked_for(words: list[str]) -> list[tuple[dict[str, str], int]]:
    """Each setting alone whose name has all of the words; without words the runs together, what is left out told."""
    if words:
        alone = [({name: value}, threads) for threads in THREADS for name, value in (*SETTINGS, *MORE)]
        return [each for each in alone if all(word in title(*each) for word in words)]
    that_change = [each for each in SETTINGS if changes(*each)]
    for name, value in SETTINGS:
        if (name, value) not in that_change:
            print(f"left out {name}={value}: it changes nothing on this CPU", flush=True)
    return together(that_change)


def main() -> int:
    """Run every setting that changes something, also after one that failed; the exit code."""
    words = sys.argv[1:]
    LOGS.mkdir(parents=True, exist_ok=True)
    for path in LEFT_OUT:
        assert (ROOT / path).exists(), f"{path} is left out and not there"
    runs = asked_for(words)
    if not runs:
        print(f"no setting has all of {words} in its name" if words else "no setting changes anything", file=sys.stderr)
        return 2
    ended = [run(*each) for each in runs]
    print(f"{sum(ended)} of {len(ended)} runs passed")
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
