"""What a wheel holds beside the package: with SQRTDK_PREBUILD=1 the compiled kernel.

The kernel is compiled for the torch that is installed and for each kind of CPU of this machine's architecture.

Under another torch such a wheel works like any other: the kernel is compiled on the machine. See `make wheel`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltKernel(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the kernel for each of its targets, outside the source tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to the wheel, which is then one of this platform."""
        asked = os.environ.get("SQRTDK_PREBUILD", "")
        if asked not in ("", "0", "1"):
            raise ValueError(f"SQRTDK_PREBUILD is {asked!r}; it is 1 for a wheel with the kernel, or 0")
        if asked != "1" or version != "standard":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))  # what is packed, not what is installed
        from sqrtdk.impl.kernel import build, libraries

        self.folder = tempfile.TemporaryDirectory()
        for target in libraries.targets_here():
            made = build.compile_into(Path(self.folder.name), target)
            build_data["force_include"][str(made)] = f"sqrtdk/impl/kernel/{libraries.PREBUILT.name}/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "folder"):
            self.folder.cleanup()
