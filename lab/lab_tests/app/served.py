"""The explorer, served by the command line in a process of its own, and requests that no browser makes."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FIRST_LINE = re.compile(r"探索页：http://127\.0\.0\.1:(\d+)/zh/（")


@dataclass(frozen=True, slots=True)
class Served:
    """A page that is served."""

    process: subprocess.Popen[str]
    port: int
    folder: Path  # for temporary files of the process

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET", body: bytes = b""
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, body and headers of the answer; the path is sent as it is.

        A refusal is sent before the body is read, and closes the connection: the system may then lose the answer.
        """
        for _ in range(4):
            with contextlib.suppress(ConnectionResetError):
                return self._ask(path, headers, method, body)
        return self._ask(path, headers, method, body)

    def _ask(
        self, path: str, headers: Mapping[str, str] | None, method: str, body: bytes
    ) -> tuple[int, bytes, Mapping[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            named = {"Host": f"127.0.0.1:{self.port}"} | dict(headers or {})
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in named.items():
                connection.putheader(name, value)
            if body and "Content-Length" not in named:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer.status, answer.read(), {key.lower(): value for key, value in answer.getheaders()}


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Serve the page on a free port until the block is left; its temporary files go into the folder.

    It is asked for in Chinese, so that the first line names that page; the other is served as well.
    """
    temporary = folder / "tmp"
    temporary.mkdir()
    settings = os.environ | {"TMPDIR": str(temporary), "GRADIO_ANALYTICS_ENABLED": "True"}
    process = subprocess.Popen(
        [sys.executable, "-m", "sqrtdk", "app", "--port", "0", "--lang", "zh-CN"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=settings,
        cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background ignores it
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = FIRST_LINE.match(line)
        assert found, line + process.stderr.read()
        yield Served(process, int(found[1]), temporary)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=120)
        finally:
            process.kill()
            if process.stderr is not None:
                process.stderr.close()
