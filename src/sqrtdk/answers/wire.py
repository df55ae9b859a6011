"""Requests to a server: counted, limited in number, time and size, and each failure said in one sentence.

Nothing is sent but to the address that the user names: redirections are refused, and a proxy of the environment is not
used. The key is read from an environment variable, sent as a bearer token, and blotted out of everything that is shown.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sqrtdk._extras import load_extra
from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.messages import Message

KEY_VARIABLE = "SQRTDK_SERVER_KEY"
REQUESTS = 200  # that may be made of one server
REQUEST_SECONDS = 60.0  # that one request may take
_CONNECT_SECONDS = 10.0
_LONGEST_REPLY = 64 * 2**20  # bytes; 20 log-probabilities at 8192 places are 8 MB
_BUSY = (429, 502, 503, 504)  # asked again: the server is loading, or asks for patience
_TIMES = 2  # that a busy server is asked again
_QUOTED = 200  # characters of what a server says, in an error


@dataclass(slots=True, eq=False)
class Wire:
    """The connection to one server.

    Attributes:
        url: Its address, without what a kind of server has behind it.
        key_from: Environment variable that holds the key.
        most: Requests that may be made.
        seconds: That one request may take.
        requests: How many were made, with those that a busy server was asked again.
    """

    url: str
    key_from: str = KEY_VARIABLE
    most: int = REQUESTS
    seconds: float = REQUEST_SECONDS
    requests: int = 0
    _pool: Any = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        """Check the address and the limits."""
        self.url = checked_address(self.url)
        if self.most < 1 or not self.seconds > 0:
            raise InvalidValueError(
                Message("servers.limits", requests=self.most, seconds=f"{self.seconds:g}"),
                hint=Message("servers.hint.limits"),
            )

    def __repr__(self) -> str:
        return f"Wire({self.url}, {self.requests} of {self.most} requests)"

    def check_room(self, planned: int) -> None:
        """Refuse more requests than are left.

        Raises:
            InvalidValueError: There are fewer.
        """
        if self.requests + planned > self.most:
            raise InvalidValueError(
                Message("servers.too_many", planned=planned, left=self.most - self.requests, most=self.most),
                hint=Message("servers.hint.too_many"),
            )

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one JSON document, and return the one that comes back.

        Args:
            path: What follows the address.
            body: The document.

        Raises:
            InvalidValueError: No request is left.
            ModelError: The server can't be reached, takes too long, refuses, or answers with no JSON.
        """
        with self._lock:
            self.check_room(1)
            self.requests += 1
            urllib3 = load_extra("urllib3", "server")
            if self._pool is None:
                # A server that is asked to wait longer than this is not waited for.
                again = urllib3.Retry(
                    total=_TIMES, connect=0, read=0, redirect=0, other=0, status=_TIMES, status_forcelist=_BUSY,
                    allowed_methods=None, backoff_factor=0.2, respect_retry_after_header=False, raise_on_status=False,
                )  # fmt: skip
                self._pool = urllib3.PoolManager(maxsize=8, retries=again)
        key = os.environ.get(self.key_from, "")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        begun = time.monotonic()
        timeout = urllib3.Timeout(connect=min(self.seconds, _CONNECT_SECONDS), read=self.seconds)
        try:
            answer = self._pool.request(
                "POST", self.url + path, body=json.dumps(body).encode(), headers=headers, timeout=timeout,
                redirect=False, preload_content=False,
            )  # fmt: skip
            with self._lock:
                self.requests += len(answer.retries.history) if answer.retries is not None else 0
            content = self._content(answer, begun)
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(urllib3.exceptions, error) from None  # its text has the headers' host and port
        return self._document(answer, content, key)

    def _content(self, answer: Any, begun: float) -> bytes:
        """Return the body of an answer; a server that sends one byte a minute is not waited for."""
        parts, size = [], 0
        try:
            while part := answer.read1(2**16):  # what has come; `stream` waits until so many bytes have
                parts.append(part)
                size += len(part)
                if size > _LONGEST_REPLY:
                    raise ModelError(
                        Message("servers.too_long", url=self.url, mib=_LONGEST_REPLY // 2**20),
                        hint=Message("servers.hint.not_api"),
                    )
                if time.monotonic() - begun > self.seconds:
                    raise self._stalled()
        finally:
            answer.release_conn() if size <= _LONGEST_REPLY else answer.close()
        return b"".join(parts)

    def _document(self, answer: Any, content: bytes, key: str) -> dict[str, Any]:
        if 300 <= answer.status < 400:
            raise ModelError(
                Message("servers.redirects", url=self.url, status=answer.status), hint=Message("servers.hint.redirects")
            )
        if answer.status >= 400:
            told = " ".join(content[: 4 * _QUOTED].decode("utf-8", "replace").split())
            raise Refused(
                answer.status,
                Message("servers.refused", url=self.url, status=answer.status, told=blotted(told, key)[:_QUOTED]),
                hint=Message(
                    f"servers.hint.status_{answer.status}" if answer.status in (401, 404) else "servers.hint.status"
                ),
            )
        try:
            document = json.loads(content)
        except ValueError:
            raise ModelError(Message("servers.no_json", url=self.url), hint=Message("servers.hint.not_api")) from None
        if isinstance(document, list) and len(document) == 1:  # TGI and llama-server wrap one answer so at times
            document = document[0]
        if not isinstance(document, dict):
            raise ModelError(Message("servers.no_json", url=self.url), hint=Message("servers.hint.not_api"))
        return document

    def _unreachable(self, exceptions: Any, error: Exception) -> ModelError:
        reason = getattr(error, "reason", None) or error
        # the more special first: to urllib3 an unknown name is a refused connection, and that a timeout
        kinds = (
            (exceptions.NameResolutionError, "no_host"),
            (exceptions.NewConnectionError, "refuses"),
            (exceptions.ConnectTimeoutError, "stalls"),
            (exceptions.ReadTimeoutError, "stalls"),
            (exceptions.SSLError, "no_tls"),
        )
        name = next((name for kind, name in kinds if isinstance(reason, kind)), "breaks_off")
        if name == "stalls":
            return self._stalled()
        return ModelError(Message(f"servers.{name}", url=self.url), hint=Message("servers.hint.running"))

    def _stalled(self) -> ModelError:
        return ModelError(
            Message("servers.stalls", url=self.url, seconds=f"{self.seconds:g}"), hint=Message("servers.hint.stalls")
        )


class Refused(ModelError):
    """The server answered with a status of 400 or above, which is `status`."""

    def __init__(self, status: int, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


def checked_address(url: str) -> str:
    """Return an address without the slash at its end.

    Raises:
        InvalidValueError: It is not http or https, has no host, or holds a password or a query, where keys are put.

    Example:
        >>> checked_address("http://127.0.0.1:8000/v1/")
        'http://127.0.0.1:8000/v1'
    """
    try:
        parts = urlsplit(url)
        port_is_number = parts.port is None or parts.port >= 0
    except ValueError:
        parts, port_is_number = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_number:
        raise InvalidValueError(Message("servers.no_address"), hint=Message("servers.hint.address"))
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        # not shown: it may hold a key
        raise InvalidValueError(
            Message("servers.secret_in_address"), hint=Message("servers.hint.key", variable=KEY_VARIABLE)
        )
    return url.rstrip("/")


def blotted(text: str, key: str) -> str:
    """Return a server's text without the key, which some quote when they refuse it.

    Example:
        >>> blotted("no such key: sk-12345", "sk-12345")
        'no such key: ***'
    """
    return text.replace(key, "***") if key else text
