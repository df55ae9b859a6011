"""Make the environments that the tests of real pairs (tests/compare/real) run in, in out/real or $SQRTDK_REAL.

    python scripts/real.py [FOLDER]
    FOLDER/ports/bin/python -m pytest -m slow tests/compare/real

ports: sqrtdk with its tests' packages, and packages with ports of Hugging Face's models. These are installed without
their dependencies, which would bring a CUDA build of torch, datasets and services; what the models themselves import
is listed beside them. transformers-VERSION: an older release of transformers, alone with torch; sqrtdk is not there.

Only packages are fetched, no weights and no data. An environment that is there is left as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PORTS = (
    "keras-hub==0.32.0",
    "litgpt==0.5.13",
    "lightning==2.6.6",  # and what it imports, for litgpt
    "lightning-utilities==0.15.3",
    "torchmetrics==1.9.0",
    "curated-transformers==2.0.1",
    "catalogue==2.0.10",  # for curated-transformers
    "ibm-fms==1.13.1",
    "diffusers==0.42.1",
    "protenix==0.5.0",
    "gemma==3.0.2",  # for tests/frontends/test_jax_real.py; later releases import tensorflow
    "penzai==0.2.5",
    "ordered-set==4.1.0",  # for penzai
    "flax==0.12.8",  # and what it imports, for gemma
    "optax==0.2.8",
    "treescope==0.1.10",
)
OLD = ("5.2.0", "4.55.0")  # of transformers


def install(folder: Path, *arguments: str) -> None:
    """Install with the environment's own pip."""
    command = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-qq", "install", *arguments]
    subprocess.run(command, check=True, cwd=ROOT)


def make(folder: Path, steps: list[tuple[str, ...]]) -> None:
    """Make an environment; a stamp says that it is whole."""
    stamp = folder / ".whole"
    if stamp.exists():
        return
    print(f"Making {folder} ...", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    for step in steps:
        install(folder, *step)
    stamp.touch()


def main(folder: Path) -> None:
    """Make all of them."""
    pinned = ("--constraint", str(CONSTRAINTS))
    make(
        folder / "ports",
        [(*pinned, "torch"), (*pinned, "--editable", f"{ROOT}[test]"), (*pinned, "--no-deps", *PORTS)],
    )
    for release in OLD:
        # The constraints hold transformers at another release; torch, which alone needs them, is there by then.
        steps = [(*pinned, "torch"), (f"transformers=={release}", "numpy", "safetensors")]
        make(folder / f"transformers-{release}", steps)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SQRTDK_REAL", ROOT / "out" / "real")))
