"""Put a comment on a pull request, or replace the one that an earlier run left there.

`comment.py NUMBER FILE`, with TOKEN, GITHUB_REPOSITORY and GITHUB_API_URL in the environment. The first line of FILE is
the mark by which a comment is known; only comments of a bot count, so nobody's words are replaced. Where the token may
not write, as on pull requests from forks, it says so and fails nothing: the job's summary has the same text.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 65_000  # GitHub takes 65536
MOST_PAGES = 30
CUT = "\n\n... the rest is cut: see the job's summary\n"
TIMEOUT_S = 30


def main(number: str, file: str) -> None:
    """Find the comment of an earlier run, and replace it; else add one."""
    comments = f"{os.environ.get('GITHUB_API_URL', 'https://api.github.com')}/repos/{os.environ['GITHUB_REPOSITORY']}"
    body = Path(file).read_text(encoding="utf-8")
    mark = body.partition("\n")[0]
    if len(body) > MOST_CHARACTERS:
        body = body[: MOST_CHARACTERS - len(CUT)] + CUT
    try:
        known = _of_an_earlier_run(f"{comments}/issues/{int(number)}/comments", mark)
        if known is None:
            _ask("POST", f"{comments}/issues/{int(number)}/comments", {"body": body})
        else:
            _ask("PATCH", f"{comments}/issues/comments/{known}", {"body": body})
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403, 404):
            raise
        print(f"::warning::sqrtdk: no comment, the token may not write one ({error.code}); it is in the job's summary")


def _of_an_earlier_run(comments: str, mark: str) -> int | None:
    """The number of a bot's comment that begins with the mark."""
    for page in range(1, MOST_PAGES + 1):
        found = _ask("GET", f"{comments}?per_page=100&page={page}")
        for comment in found:
            by_bot = (comment.get("user") or {}).get("type") == "Bot"
            if by_bot and str(comment.get("body", "")).partition("\n")[0].strip() == mark:
                return int(comment["id"])
        if len(found) < 100:
            break
    return None


def _ask(method: str, address: str, content: Any = None) -> Any:
    request = urllib.request.Request(
        address,
        method=method,
        data=None if content is None else json.dumps(content).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['TOKEN']}",
            "Accept": "application/vnd.github+json",
            "Content-Type": "application/json",
            "User-Agent": "sqrtdk",
        },
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
