"""Programs and compilers for tests of how the compiled kernel is built and loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sqrtdk.impl.kernel import load
from tests.support.program import Warm

CALL = """
import json, sys, torch, sqrtdk
q = torch.randn(1, 8, 512, 64)
softcap = {"softcap": 30.0}
found = {
    "plain": sqrtdk.explain(q, q, q).impl,
    "choice": sqrtdk.explain(q, q, q, **softcap).impl,
    "reason": sqrtdk.explain(q, q, q, **softcap).reason,
    "sum": float(sqrtdk.attention(q, q, q, return_aux=sqrtdk.AuxRequest.all(), **softcap)[1].keys.sum()),
}
try:
    sqrtdk.attention(q, q, q, impl="cpu")
    found["named"] = "runs"
except NotImplementedError as error:
    found["named"] = f"{error} | {error.hint}"
print(json.dumps(found))
"""


def script(path: Path, body: str) -> Path:
    """An executable that stands for a compiler; `$made` is the file that it shall write."""
    path.write_text(
        f'#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && made=$2; shift; done\n{body}\n', encoding="utf-8"
    )
    path.chmod(0o755)
    return path


def built() -> Path:
    """The library that this process uses."""
    path = load.library()
    assert path is not None
    return path


def planted(cache: Path) -> Path:
    """A copy of that library in another cache."""
    folder = cache / "sqrtdk"
    folder.mkdir(mode=0o700, parents=True)
    return Path(shutil.copy(built(), folder))


def quick(path: Path, wait: float = 0.0) -> Path:
    """A compiler that is through at once, with the library that is there; half of it is there while it works."""
    return script(path, f'printf half > "$made"; sleep {wait}; cp "{built()}" "$made"')


def settings(cache: Path, **more: str) -> dict[str, str]:
    """Variables of the environment that name a cache, and others."""
    return {"SQRTDK_CACHE": str(cache)} | more


def call(warm: Warm, variables: dict[str, str]) -> dict[str, str]:
    """What `CALL` tells in a fork."""
    return told(warm(CALL, verb="-c", **variables))


def fresh_call(variables: dict[str, str]) -> dict[str, str]:
    """What `CALL` tells in a process that imports the package itself."""
    command = [sys.executable, "-c", CALL]
    return told(subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False))


def told(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    document: dict[str, str] = json.loads(done.stdout)
    return document
