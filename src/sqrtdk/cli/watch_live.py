"""`sqrtdk watch show --follow` and `--serve`: a run while it is written, in the terminal and as a page.

The page is served on loopback. It asks every two seconds for `state`, a few bytes, and loads itself again once a part
has landed. Every site that the reader's browser shows can reach loopback, so a request is answered only if it names
this server as its host, and comes from the page itself or from the address bar.
"""

from __future__ import annotations

import json
import secrets
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NoReturn

from sqrtdk import _files
from sqrtdk._language import Choice, Language
from sqrtdk.errors import InvalidValueError, SqrtdkError, text_of
from sqrtdk.messages import Message
from sqrtdk.monitor.reading import GrowingRun
from sqrtdk.report.watch.summary import Summary, summarise

LOOPBACK = "127.0.0.1"
_LOOK_EVERY_S = 1.0  # between two looks at the folder
_LIVE_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page has the rest of its policy in itself
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def follow_run(folder: Path, columns: list[str], language: Language) -> Summary:
    """Draw a run in the terminal each time it has grown, until the process that writes it is gone or stdout is closed.

    Args:
        folder: Folder of the run.
        columns: Statistics to draw, by column; as many as fit on the screen are.
        language: "en" or "zh".

    Returns:
        The run as it was drawn last.
    """
    from sqrtdk.cli.output import colors, print_text, screen, tell_reader, width
    from sqrtdk.report.watch.terminal import live_text, to_text

    run = GrowingRun(folder)
    grown = run.read()
    assert grown is not None  # the first read always finds something, or raises
    summary = summarise(grown)
    if run.writer == "unknown":
        tell_reader(Message("runs.writer.unknown"))
    while True:
        if grown is not None:
            summary, lines = summarise(grown), screen()
            if lines is None:
                text = to_text(summary, columns, width=width(), color=colors(), language=language)
            else:
                text = live_text(summary, columns, lines, width=width(), color=colors(), language=language)
            if not print_text(text):
                return summary
        if run.over:
            tell_reader(writer_sentence(run, summary))
            return summary
        time.sleep(_LOOK_EVERY_S)
        grown = run.read()


def writer_sentence(run: GrowingRun, summary: Summary) -> Message:
    """Return the sentence that says that the process that wrote the run was killed or has ended, and at which step.

    Args:
        run: The run, whose `writer` is no longer writing.
        summary: Its latest summary.
    """
    step = "-" if summary.last_step is None else summary.last_step
    return Message("runs.writer.killed" if run.writer == "killed" else "runs.writer.ended", step=step)


def serve_run(folder: Path, port: int, language: Choice, ready: Callable[[str], None]) -> NoReturn:
    """Serve the page of a run on 127.0.0.1 until Ctrl-C raises.

    Args:
        folder: of the run.
        port: port to listen on; 0 takes a free one.
        language: the language that the page opens in.
        ready: called with the page's address once the server listens.

    Raises:
        RunFolderError: the folder holds no run.
        InvalidValueError: the port can't be listened on.
    """
    live = LivePage(folder, language)
    try:
        server = PageServer((LOOPBACK, port), live)
    except OSError as error:
        raise InvalidValueError(
            Message("errors.options.port_taken", port=port, address=LOOPBACK, reason=_files.os_reason(error)),
            hint=Message("errors.hint.another_port"),
        ) from error
    with server:
        ready(f"http://{LOOPBACK}:{server.server_address[1]}/")
        while True:
            server.serve_forever()


class LivePage:
    """The page of a run that is still written; its methods may be called from several threads.

    Args:
        folder: The folder of the run.
        language: Language that the page opens in.
    """

    def __init__(self, folder: Path, language: Choice) -> None:
        self._run, self._language = GrowingRun(folder), language
        self._lock = threading.Lock()
        self._server = secrets.token_hex(4)  # a page of an earlier server is not taken for one of this
        self._number = 0
        self._page = b""
        self._summary: Summary | None = None
        self.look()

    def look(self) -> dict[str, str]:
        """Return the answer to a request for `state`.

        Returns:
            "mark", a text that changes with the run; and "writer", the state of the process that writes it.
        """
        with self._lock:
            grown = self._run.read()
            if grown is not None:
                self._summary, self._page = summarise(grown), b""
                self._number += 1
            writer = self._run.writer if self._run.over or self._run.writer == "unknown" else "writing"
            return {"mark": f"{self._server}-{self._number}", "writer": writer}

    def page(self) -> bytes:
        """Return the page as HTML in UTF-8; it is drawn again only if the run has grown since the last call."""
        from sqrtdk.report.watch.html import to_html

        mark = self.look()["mark"]
        with self._lock:
            assert self._summary is not None
            self._page = self._page or to_html([self._summary], language=self._language, live=mark).encode()
            return self._page


class PageServer(socketserver.ThreadingTCPServer):
    """An HTTP server of a `LivePage`, with a thread for each request.

    Args:
        address: Address to listen on and port; port 0 takes a free one.
        live: The page.

    Attributes:
        live: The page.
        hosts: The values of the header `Host` that are the server's own, as "localhost:8000".
    """

    allow_reuse_address = True
    daemon_threads = True  # Ctrl-C waits for no browser

    def __init__(self, address: tuple[str, int], live: LivePage) -> None:
        self.live = live
        super().__init__(address, _Handler)
        port = self.server_address[1]
        self.hosts = (f"{LOOPBACK}:{port}", f"localhost:{port}")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a browser that closes a connection early is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10  # seconds: a connection that sends nothing holds no thread for longer

    def do_GET(self) -> None:
        """Answer with the page or its state."""
        if refusal := self._refusal():
            self._send(*refusal, "text/plain")
            return
        try:
            if self.path == "/":
                self._send(200, self.server.live.page(), "text/html")
            else:
                self._send(200, json.dumps(self.server.live.look()).encode(), "application/json")
        except SqrtdkError as error:  # the folder was removed
            self._send(503, text_of(error).encode(), "text/plain")

    def _refusal(self) -> tuple[int, bytes] | None:
        """Return status and reason of a refusal; None if the page itself or the address bar asks."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            return 421, b"This page answers to its own name alone."  # a name that resolves to 127.0.0.1
        if any(origin != f"http://{hosts[0]}" for origin in self.headers.get_all("Origin", [])):
            return 403, b"This page answers to itself alone."
        site, mode = (self.headers.get(f"Sec-Fetch-{name}", "none") for name in ("Site", "Mode"))
        if site not in ("none", "same-origin") and mode != "navigate":
            return 403, b"This page answers to itself alone."
        return None if self.path in ("/", "/state") else (404, b"There is no such page.")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response_only(status)
        for name, value in _LIVE_HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing: the terminal is the user's."""
