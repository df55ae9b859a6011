"""Serves the page on loopback until it is interrupted."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.extending import Language, load_extra, os_reason
from sqrtdk.messages import Message
from sqrtdk_lab.app.guard import App, Guard

LOOPBACK = "127.0.0.1"
_APP_EXTRA = "app"
_QUIET = {  # Gradio reads these when it is imported: no analytics, no sharing, no files
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_RUN_HISTORY": "False",
    "GRADIO_SSR_MODE": "False",
    "GRADIO_SHARE": "False",
    "GRADIO_MCP_SERVER": "False",
    "GRADIO_ALLOWED_PATHS": "",
}


def serve(port: int, ready: Callable[[str], None]) -> None:
    """Serve the page on 127.0.0.1 until interrupted. Nothing of the run stays on the disk.

    Args:
        port: port to listen on; 0 takes a free one.
        ready: called with the page's address once the server listens.

    Raises:
        MissingExtraError: Gradio is not installed.
        InvalidValueError: the port can't be listened on.
    """
    if not 0 <= port <= 65535:
        raise InvalidValueError(
            Message("errors.options.port", port=str(port)), hint=Message("errors.hint.leave_port_out")
        )
    with tempfile.TemporaryDirectory(prefix="sqrtdk-app-", ignore_cleanup_errors=True) as folder:
        os.environ.update(_QUIET | {"GRADIO_TEMP_DIR": folder})
        uvicorn = load_extra("uvicorn", _APP_EXTRA)
        load_extra("gradio", _APP_EXTRA)
        with _listening(port) as listener:
            port = listener.getsockname()[1]
            app = application(port, Path(folder))
            config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, ws="none")
            config.timeout_graceful_shutdown = 3  # seconds: an open page holds a stream that never ends
            ready(f"http://{LOOPBACK}:{port}/")
            uvicorn.Server(config).run(sockets=[listener])


def application(port: int, folder: Path) -> App:
    """Return the page as an ASGI application behind its guard.

    Args:
        port: port that it is served on.
        folder: temporary folder, removed when the server ends.
    """
    from sqrtdk_lab.app.page import LANGUAGE_CHOICES, build_page, page_look

    fastapi, gradio = load_extra("fastapi", _APP_EXTRA), load_extra("gradio", _APP_EXTRA)
    responses = load_extra("fastapi.responses", _APP_EXTRA)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # SIGTERM ends the process before the caller's `with` removes it

    app = fastapi.FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    async def root(request: Any) -> Any:
        return responses.RedirectResponse(f"/{language_of(request.headers.get('accept-language', ''))}/", 307)

    async def nothing(request: Any) -> Any:
        return responses.JSONResponse({})

    app.router.add_route("/", root, methods=["GET", "HEAD"])
    app.router.add_route("/manifest.json", nothing, methods=["GET"])
    app.router.add_route("/favicon.ico", nothing, methods=["GET"])
    functions: dict[str, dict[int, int]] = {}
    for language in LANGUAGE_CHOICES:
        page = build_page(language)
        functions[language] = {number: len(called.inputs) for number, called in page.fns.items()}
        gradio.mount_gradio_app(
            app,
            page,
            path=f"/{language}",
            server_name=LOOPBACK,
            server_port=port,
            footer_links=[],
            run_history=False,
            allowed_paths=[],  # the page serves no file of this machine
            blocked_paths=["/"],
            show_error=False,
            max_file_size=0,
            ssr_mode=False,
            enable_monitoring=False,
            pwa=False,
            mcp_server=False,
            **page_look(language),
        )
    return Guard(app, (f"{LOOPBACK}:{port}", f"localhost:{port}"), functions)


def language_of(accepted: str) -> Language:
    """Return the language for an Accept-Language header: Chinese if the browser asks for it first, else English.

    Example:
        >>> language_of("zh-TW,en;q=0.5"), language_of("de-DE,zh;q=0.9"), language_of("")
        ('zh', 'en', 'en')
    """
    return "zh" if accepted.strip().lower().startswith("zh") else "en"


@contextlib.contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen()  # a browser that comes before the server runs waits instead of being refused
        except OSError as error:
            raise InvalidValueError(
                Message("errors.options.port_taken", port=port, address=LOOPBACK, reason=os_reason(error)),
                hint=Message("errors.hint.another_port"),
            ) from error
        yield listener
    finally:
        listener.close()
