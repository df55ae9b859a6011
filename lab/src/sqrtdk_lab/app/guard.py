"""Restricts requests to what the page itself sends: exact host names, its own origin, listed paths, known bodies.

Every site that the reader's browser shows can reach a page on loopback: by a name that resolves to 127.0.0.1, by a
request from another origin, or by a frame. A request that is not on the lists is answered here and goes no further.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from sqrtdk.errors import InvalidValueError, kind_and_text
from sqrtdk.extending import parse_json

_LOG = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

Functions = Mapping[str, Mapping[int, int]]  # language -> number of a function -> number of its inputs

LARGEST_BODY = 2**20  # bytes: the page sends a dozen short values
_SAFE_PATH = r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"  # no "..", so no path leads upwards
_PATHS = {  # all paths that the page requests: our own, then Gradio's for each language
    "GET": (
        r"/",
        r"/manifest\.json",
        r"/favicon\.ico",
        r"/(en|zh)/?",
        rf"/(en|zh)/assets/{_SAFE_PATH}",
        rf"/(en|zh)/static/{_SAFE_PATH}(/{_SAFE_PATH})*",
        r"/(en|zh)/(config|theme\.css)",
        r"/(en|zh)/gradio_api/(info|queue/data|startup-events)",
        r"/(en|zh)/gradio_api/heartbeat/[a-z0-9]+",
    ),
    "HEAD": (r"/", r"/(en|zh)/?"),
    "POST": (r"/(en|zh)/gradio_api/(queue/join|cancel|reset)",),
}
_ALLOWED = {method: re.compile("|".join(f"(?:{path})" for path in paths)) for method, paths in _PATHS.items()}
_BODY_FIELDS: Mapping[str, Mapping[str, type]] = {  # required fields of posted bodies
    "join": {"data": list, "fn_index": int, "session_hash": str},
    "cancel": {"event_id": str, "fn_index": int, "session_hash": str},
    "reset": {"event_id": str},
}
_TYPE_NAMES = {list: "list", int: "whole number", str: "text"}
_SESSION_TOKEN = re.compile(r"[A-Za-z0-9_-]{0,64}")  # Gradio's names of sessions and events
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",  # Gradio compiles scripts of its components
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'self'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """An ASGI application that passes on only requests that the page itself makes."""

    def __init__(self, app: App, hosts: Iterable[str], functions: Functions) -> None:
        """Guard an application.

        Args:
            app: the ASGI application.
            hosts: accepted values of the Host header, with the port.
            functions: functions that the page calls.
        """
        self._app = app
        self._hosts = frozenset(hosts)
        self._functions = functions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused, and pass on any other."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        body = await _body(receive) if scope["method"] == "POST" else b""
        if body is None:
            await _answer(send, 413, f"A request has at most {LARGEST_BODY} bytes.")
            return
        if scope["method"] == "POST" and (reason := self._wrong(scope["path"], body)):
            await _answer(send, 400, f"This is no request that the page makes: {reason}.")
            return
        begun = given = False

        async def again() -> Message:
            nonlocal given
            if given or scope["method"] != "POST":  # the body was read above: hand it on once
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def headed(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                if message["status"] == 500:  # swallow it: the exception arrives next and gets a plain answer
                    return
                begun = True
                ours = {name for name, _ in _HEADERS}
                kept = [pair for pair in message.get("headers", []) if pair[0].lower() not in ours and _local(pair[0])]
                message = {**message, "headers": [*kept, *_HEADERS]}
            if begun:
                await send(message)

        try:
            await self._app(scope, again, headed)
        except Exception as error:
            if begun:
                raise
            _LOG.warning("%s could not be answered: %s", scope["path"], kind_and_text(error))
        if not begun:
            await _answer(send, 400, "The page can't answer this request.")

    def _wrong(self, path: str, body: bytes) -> str:
        """Return why the page can't have sent this body, or "" if it can."""
        try:
            document = parse_json(body, "it", InvalidValueError, "")
        except InvalidValueError as error:
            return str(error)
        if not isinstance(document, dict):
            return "it is no object"
        language, call = path.split("/")[1], path.rpartition("/")[2]
        for name, kind in _BODY_FIELDS[call].items():
            if type(document.get(name)) is not kind:
                return f"{name} is no {_TYPE_NAMES[kind]}"
        if any(isinstance(value, str) and not _SESSION_TOKEN.fullmatch(value) for name, value in document.items()):
            return "a name in it is too long, or has other characters than letters and digits"
        if call != "join":
            return ""
        if type(document.get("trigger_id")) not in (int, type(None)):
            return "trigger_id is no whole number"
        inputs = self._functions[language].get(document["fn_index"])
        if inputs is None:
            return "fn_index is no function"
        return "" if len(document["data"]) == inputs else f"data has {len(document['data'])} inputs, not {inputs}"

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason of a refusal, or None if the request may pass."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts = headers.get("host", [])
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            # a foreign name that resolves to 127.0.0.1 (DNS rebinding)
            return 421, "This page answers to its own name alone."
        if any(origin != f"http://{hosts[0]}" for origin in headers.get("origin", [])):
            return 403, "This page answers to itself alone."
        # another site may link to the page, but neither fetch nor embed it
        site, mode = (headers.get(f"sec-fetch-{name}", ["none"])[0] for name in ("site", "mode"))
        if site not in ("none", "same-origin") and (mode != "navigate" or scope["method"] != "GET"):
            return 403, "This page answers to itself alone."
        path = scope["raw_path"].decode("latin-1") if scope.get("raw_path") else scope["path"]
        # the path is compared undecoded, so that %2e%2e and %2f match nothing
        allowed = _ALLOWED.get(scope["method"])
        if allowed is None or not allowed.fullmatch(path):
            return 404, "There is no such page."
        length = headers.get("content-length", ["0"])[0]
        if not length.isdecimal() or len(length) > 12 or int(length) > LARGEST_BODY:
            return 413, f"A request has at most {LARGEST_BODY} bytes."
        return None


def _local(name: bytes) -> bool:
    """Return whether a response header may stay; headers that open the page to other origins may not."""
    return not name.lower().startswith(b"access-control-")


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request, or None if it is too large or breaks off."""
    parts: list[bytes] = []
    taken = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        taken += len(parts[-1])
        if taken > LARGEST_BODY:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer(send: Send, status: int, reason: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason.encode()})
