"""Who gets an answer: exact names, this origin, the paths of the page; no path reaches the disk, and nothing stays."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from lab_tests.app.served import Served
from sqrtdk_lab.app.guard import LARGEST_BODY
from tests.support.program import called


def test_the_root_leads_to_the_readers_language(explorer: Served) -> None:
    for accepted, language in (("zh-CN,zh;q=0.9,en", "zh"), ("en-GB", "en"), ("", "en")):
        status, _, headers = explorer.ask("/", {"Accept-Language": accepted})
        assert (status, headers["location"]) == (307, f"/{language}/")


def test_temporary_files_are_in_a_folder_of_its_own(explorer: Served) -> None:
    """Of which nothing stays: the fixture looks when the page has ended."""
    assert explorer.ask("/en/")[0] == 200
    assert list(explorer.folder.glob("sqrtdk-app-*"))


def test_names_are_exact(explorer: Served) -> None:
    port = explorer.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert explorer.ask("/en/", {"Host": host})[0] == 200
    for host in (
        "127.0.0.1",
        "localhost",
        f"127.0.0.1:{port + 1}",
        f"LOCALHOST:{port}",
        f"localhost.:{port}",
        f"evil.example:{port}",
        f"127.0.0.1.evil.example:{port}",
        f"127.0.0.1:{port}@evil.example",
        f"0.0.0.0:{port}",
        f"[::1]:{port}",
        "",
    ):
        assert explorer.ask("/en/", {"Host": host})[0] in (400, 421), host


def test_another_origin_is_refused(explorer: Served) -> None:
    own = explorer.address
    assert explorer.ask("/en/gradio_api/info", {"Origin": own, "Sec-Fetch-Site": "same-origin"})[0] == 200
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": own.replace("http", "https")},
        {"Origin": own.replace("127.0.0.1", "localhost")},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    ):
        assert explorer.ask("/en/gradio_api/info", headers)[0] == 403, headers
        assert explorer.ask("/en/gradio_api/queue/join", headers, method="POST", body=b"{}")[0] == 403, headers
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert explorer.ask("/en/", link)[0] == 200  # a link on another page leads here, and carries nothing
    assert explorer.ask("/en/gradio_api/queue/join", link, method="POST", body=b"{}")[0] == 403


@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_path_reaches_the_disk(explorer: Served, language: str) -> None:
    here = Path(__file__).resolve()
    base = f"/{language}/gradio_api"
    for path in (
        f"{base}/file={here}",
        f"{base}/file=/etc/passwd",
        f"{base}/file/{here}",
        f"/{language}/file={here}",
        f"{base}/proxy=http://127.0.0.1/",
        f"{base}/stream/a/b/c/playlist.m3u8",
        f"{base}/custom_component/a/b/c/d",
        f"{base}/deep_link",
        f"{base}/upload_progress?upload_id=1",
        f"{base}/openapi.json",
        f"/{language}/monitoring",
        f"/{language}/assets/../../../../../etc/passwd",
        f"/{language}/assets/..%2f..%2f..%2f..%2fetc%2fpasswd",
        f"/{language}/assets/%2e%2e/%2e%2e/etc/passwd",
        f"/{language}/static//etc/passwd",
        f"/{language}/static/..\\..\\etc\\passwd",
        f"/{language}//etc/passwd",
        f"/{language}/svelte/etc/passwd",
        "/docs",
        "/../etc/passwd",
    ):
        status, body, _ = explorer.ask(path)
        assert (status, b"root:" in body) == (404, False), path
    for path in ("upload", "run/show", "api/show", "call/show", "process_recording", "vibe-edit", "component_server"):
        assert explorer.ask(f"{base}/{path}", method="POST", body=b"{}")[0] == 404, path
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
        assert explorer.ask(f"/{language}/", method=method)[0] == 404


def test_a_path_in_a_call_is_not_read(explorer: Served) -> None:
    """What a call names as a file is data of the call: no input of the page is a file."""
    _, config, _ = explorer.ask("/en/config")
    kinds = {component["type"] for component in json.loads(config)["components"]}
    assert kinds <= {"html", "dropdown", "textbox", "button", "row", "column", "tabs", "tabitem", "form"}


def test_bodies_are_small(explorer: Served) -> None:
    for length in (str(LARGEST_BODY + 1), "9" * 30, "-1", "x"):
        status = explorer.ask("/en/gradio_api/queue/join", {"Content-Length": length}, method="POST")[0]
        assert status in (400, 413), length


_JOIN = {"data": [], "fn_index": 0, "session_hash": "abc"}
_ODD_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "half": b"{",
    "no JSON": b"\xff\xfe{}",
    "NaN": b"NaN",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "no fields": b"{}",
    "deep": b"[" * 100_000,
    "a long number": b'{"data": [], "session_hash": "abc", "fn_index": ' + b"9" * 5000 + b"}",
    "a name twice": b'{"data": [], "session_hash": "abc", "fn_index": 0, "fn_index": 1}',
    **{
        f"{name} {str(value)[:20]}": json.dumps(_JOIN | {"event_id": "e"} | {name: value}).encode()
        for name, values in {
            "fn_index": (99999, -1, 0.5, float("nan"), float("inf"), True, None, "x", [], 10**30),
            "data": (None, {}, "x", [1, 2], [float("nan")], [[[[[[]]]]]] * 3),
            "session_hash": (None, 1, "a" * 10**6, "../..", "\ud800", float("nan")),
            "trigger_id": (float("nan"), 0.5, "x", True),
            "event_id": (1, "a" * 10**6, "\x00", float("nan")),
        }.items()
        for value in values
    },
}


def test_a_body_that_the_page_does_not_send_is_refused_in_words(explorer: Served) -> None:
    """No error of the server's own, and nothing in its log."""
    headers = {"Content-Type": "application/json"}
    for call in ("queue/join", "cancel", "reset"):
        for name, body in _ODD_BODIES.items():
            status, text, _ = explorer.ask(f"/en/gradio_api/{call}", headers, method="POST", body=body)
            # the other two have fewer fields, and go by those alone
            assert status in ((400, 422) if call == "queue/join" else (200, 400, 422)), (call, name)
            assert text != b"Internal Server Error", (call, name)
    log = explorer.process.stderr
    assert log is not None
    os.set_blocking(log.fileno(), False)
    told = b""
    while select.select([log], [], [], 0)[0] and (more := os.read(log.fileno(), 2**16)):
        told += more
    os.set_blocking(log.fileno(), True)
    assert b"Traceback" not in told
    good = json.dumps(_JOIN).encode()
    status, text, _ = explorer.ask(
        "/en/gradio_api/queue/join", {"Content-Type": "application/json"}, method="POST", body=good
    )
    assert (status, set(json.loads(text))) == (200, {"event_id"})


def test_headers_keep_the_page_to_itself(explorer: Served) -> None:
    for path in ("/en/", "/en/config", "/nowhere"):
        headers = explorer.ask(path, {"Origin": explorer.address})[2]
        assert "access-control-allow-origin" not in headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert not re.search(r"https?:|\*", policy)
        assert headers["x-content-type-options"] == "nosniff"


def test_the_page_names_no_other_host(explorer: Served) -> None:
    """Links and scripts of the page itself; social-media tags of Gradio's template are texts that nobody fetches."""
    for language in ("en", "zh"):
        text = explorer.ask(f"/{language}/")[1].decode()
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']([^\"']+)", text)
        assert fetched
        assert [place for place in fetched if re.match(r"https?:|//", place)] == []
        theme = explorer.ask(f"/{language}/theme.css")[1].decode()
        assert not re.search(r"@import|url\(\s*['\"]?https?:", theme)


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    done = called("app", "--port", port)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: a port is a number from 0 to 65535; got {port}")


HIDDEN = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gradio", "uvicorn", "fastapi"):
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
from sqrtdk.cli import main
sys.argv = ["sqrtdk", "app"]
main()
"""


def test_without_the_extra_there_is_one_clear_error(tmp_path: Path) -> None:
    settings = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], capture_output=True, text=True, timeout=300, check=False, env=settings
    )
    assert done.returncode == 2
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert re.fullmatch(r"Error: \w+ can't be imported: No module named '\w+'", first)
    assert second == "Hint: Install it: pip install 'sqrtdk[app]'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", ["import sqrtdk", "import sys; sys.argv = ['sqrtdk', '--help']; import sqrtdk.cli"])
def test_nothing_of_it_is_imported_before(code: str) -> None:
    told = (
        "import sys; print([name for name in sys.modules if name.startswith(('gradio', 'fastapi', 'sqrtdk_lab.app'))])"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}; {told}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
