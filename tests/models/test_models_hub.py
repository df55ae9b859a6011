"""Names: paths are judged at once, ids asked for once, and the hub here is a real server on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from huggingface_hub import constants

from sqrtdk.errors import ModelError
from sqrtdk.models import hub
from sqrtdk.models.names import check_name, locate

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"graph",
}


class Hub:
    """What of the hub's interface a download needs, and which requests came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.files = dict(FILES)
        self.requests: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                path = urlparse(self.path).path
                if path.startswith("/api/models/") or "/resolve/" in path:  # the library has questions of its own
                    outer.requests.append(f"{self.command} {path}")
                body, headers = outer.answer(path)
                self.send_response(200 if body is not None else 404)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                if self.command == "GET" and body:
                    self.wfile.write(body)

            do_HEAD = do_GET

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        settings(monkeypatch, cache, f"http://127.0.0.1:{self.server.server_port}")

    def answer(self, path: str) -> tuple[bytes | None, dict[str, str]]:
        commit = {"X-Repo-Commit": COMMIT}
        if path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            return json.dumps(tree).encode(), {"Content-Type": "application/json"}
        if path in ("/api/models/org/name", "/api/models/org/name/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            return json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode(), {}
        name = path.removeprefix(f"/org/name/resolve/{COMMIT}/")
        if name in self.files:
            return self.files[name], commit | {"ETag": f'"{hashlib.sha1(self.files[name]).hexdigest()}"'}
        return None, {"X-Error-Code": "RepoNotFound"}


def settings(monkeypatch: pytest.MonkeyPatch, cache: Path, endpoint: str, seconds: float = 10) -> None:
    for name, value in {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_ETAG_TIMEOUT": seconds,
    }.items():
        monkeypatch.setattr(constants, name, value)


@pytest.fixture(autouse=True)
def _nothing_asked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_asked_ahead", {})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    made = Hub(monkeypatch, tmp_path / "cache")
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as free:  # nobody listens there once it is closed
        free.bind(("127.0.0.1", 0))
        settings(monkeypatch, tmp_path / "cache", f"http://127.0.0.1:{free.getsockname()[1]}")


def cached(cache: Path) -> None:
    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(FILES["config.json"])
    (cache / "models--org--name" / "refs").mkdir()
    (cache / "models--org--name" / "refs" / "main").write_text(COMMIT)


PATHS = [
    "nosuchdir/",
    "./nosuchdir",
    "../nosuchdir",
    "./nosuchdir/",
    "~/nosuchdir",
    "~nosuchuser/x",
    "/no/such",
    "/nosuchdir",
    "org/name/more",
    "org//name",
    "org/name/",
    "config.json",
    "nosuchdir/config.json",
    "nosuchdir/model.safetensors",
    "model.gguf",
    "",
    "bad id",
    "org/na me",
    "-org",
    "org/../name",
    "n" * 5000,
    "a\0b",
    "\udcff",
]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_is_none_is_not_asked_for(
    served: Hub, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"there is no|neither a hub id") as caught:
        check_name(name, None, pytest.fail)
    assert caught.value.hint
    assert served.requests == []


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("nowhere", path)])
def test_what_is_there_and_no_directory_is_not_asked_for(
    served: Hub, tmp_path: Path, make: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make("thing")
    with pytest.raises(ModelError, match="'thing' is not a directory"):
        check_name("thing", None, pytest.fail)
    assert served.requests == []


def test_a_name_without_a_slash_is_told_to_be_no_directory_before_the_hub_is_asked(served: Hub) -> None:
    told: list[tuple[str, int]] = []
    with pytest.raises(ModelError, match="'nosuchdir' is neither a local directory nor a model that the hub gives"):
        check_name("nosuchdir", None, lambda name: told.append((name, len(served.requests))))
    assert told == [("nosuchdir", 0)]
    assert served.requests == ["GET /api/models/nosuchdir"]


def test_names_that_need_no_hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory").mkdir()
    for name in ("demo", "demo:unscaled", "package.module:factory", "directory", "directory/", "./directory", "."):
        check_name(name, None, pytest.fail)
    assert served.requests == []


def test_what_is_downloaded(served: Hub) -> None:
    check_name("org/name", None, pytest.fail)
    kind, directory = locate("org/name", None, weights=False, trust_remote_code=False)
    assert (kind, sorted(os.listdir(directory))) == ("hub", ["config.json"])
    _, directory = locate("org/name", "main", weights=True, trust_remote_code=False)
    assert sorted(os.listdir(directory)) == ["config.json", "model.safetensors"]
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    _, directory = locate("org/name", None, weights=True, trust_remote_code=True)
    assert sorted(os.listdir(directory)) == ["config.json", "model.safetensors", "modeling.py"]


def test_a_program_asks_once(served: Hub) -> None:
    """In `check_name`; then `locate` may come several times: once for each kind of attention."""
    check_name("org/name", None, pytest.fail)
    for _ in range(2):
        locate("org/name", None, weights=True, trust_remote_code=False)
    assert served.requests.count("GET /api/models/org/name") == 1


def test_a_library_asks_each_time(served: Hub) -> None:
    for _ in range(2):
        hub.fetch("org/name", weights=False)
    assert served.requests.count("GET /api/models/org/name") == 2


def test_a_hub_that_gave_nothing_is_not_asked_again(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(tmp_path / "cache")
    monkeypatch.setattr(served, "answer", lambda _: (None, {"X-Error-Code": "RepoNotFound"}))
    check_name("org/name", None, pytest.fail)
    for _ in range(2):
        _, directory = locate("org/name", None, weights=True, trust_remote_code=False)
        assert os.listdir(directory) == ["config.json"]
    assert served.requests == ["GET /api/models/org/name"]


def test_pickles_are_refused_before_the_download(served: Hub) -> None:
    del served.files["model.safetensors"]
    with pytest.raises(ModelError, match="pickled"):
        hub.fetch("org/name", weights=True)
    assert not any("resolve" in request for request in served.requests)
    assert os.listdir(hub.fetch("org/name", weights=False)) == ["config.json"]


def test_an_unknown_id_costs_one_request(served: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="'org/other' is neither a local directory nor a model that the hub gives"):
        hub.ask("org/other")
    assert served.requests == ["GET /api/models/org/other"]
    assert capfd.readouterr() == ("", "")


def test_without_a_network_an_id_is_asked_for_once(unreachable: None, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError) as caught:
        hub.ask("org/name")
    assert str(caught.value) == (
        "'org/name' is neither a local directory nor a model in the cache, and the hub can't be reached (ConnectError)"
    )
    assert "network" in caught.value.hint
    assert capfd.readouterr() == ("", "")


def test_offline_nothing_is_asked(
    served: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection is opened"))
    for name in ("nosuchdir", "org/name"):
        with pytest.raises(ModelError) as caught:
            check_name(name, None, pytest.fail)
        assert str(caught.value) == (
            f"{name!r} is neither a local directory nor a model in the cache, and the hub is not asked"
        )
        assert caught.value.hint.startswith(f"{name!r} does not exist here: check the path. HF_HUB_OFFLINE is set: ")
    assert served.requests == []
    assert capfd.readouterr() == ("", "")


def test_a_network_that_ends_before_the_download_is_not_quoted(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    file_names = hub._file_names

    def last_answer(*args: object) -> list[str]:
        names = file_names(*args)
        served.server.shutdown()
        served.server.server_close()
        return names

    monkeypatch.setattr(hub, "_file_names", last_answer)
    with pytest.raises(ModelError) as caught:
        hub.fetch("org/name", weights=False)
    assert re.fullmatch(r"'org/name' is neither .* the hub can't be reached \(\w+\)", str(caught.value))


def test_without_a_network_the_cache_serves(unreachable: None, tmp_path: Path) -> None:
    cached(tmp_path / "cache")
    assert hub.ask("org/name", before=lambda: pytest.fail("it is in the cache")) is None
    assert os.listdir(hub.fetch("org/name", weights=True)) == ["config.json"]
    with pytest.raises(ModelError, match="nor a model in the cache"):
        hub.ask("org/name", "other")


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings(monkeypatch, tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.2)
        with pytest.raises(
            ModelError, match=r"(?m)the hub can't be reached \(.*(Timeout|no answer within 0.2 s)[^:]*$"
        ):
            hub.ask("org/name")


def test_a_name_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings(monkeypatch, tmp_path, "http://no-such-host.invalid", seconds=0.2)
    over, asked = threading.Event(), threading.Event()

    def never(*_: object, **__: object) -> None:
        asked.set()
        over.wait(60)
        raise OSError("the test is over")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    try:
        with pytest.raises(ModelError, match=r"no answer within 0.2 s \(HF_HUB_ETAG_TIMEOUT\)"):
            hub.ask("org/name")
        assert asked.wait(120)  # by a thread, which a busy machine may start late
    finally:
        over.set()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["nosuchdir", "org/name"])
@pytest.mark.parametrize("offline", ["0", "1"])
def test_the_program_says_so_before_it_imports_torch(tmp_path: Path, name: str, offline: str) -> None:
    code = (
        f"import sys; sys.argv = ['sqrtdk', 'check', {name!r}]\n"
        "from sqrtdk.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    environment = os.environ | {
        "HF_HUB_OFFLINE": offline,
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # discard: nobody listens
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    asked = offline == "0" and name == "nosuchdir"
    assert lines[:1] == (["There is no directory 'nosuchdir': asking the hub for it."] if asked else lines[:1])
    assert lines[asked].startswith(f"Error: {name!r} is neither a local directory nor a model in the cache")
    assert "Errno" not in done.stderr
    assert lines[asked + 1].startswith(f"Hint: {name!r} does not exist here: check the path. ")
    assert lines[asked + 2 :] == ["[]"]  # nothing of the library's own, nothing imported
    assert done.stdout == ""
