"""What the browser tests import of Playwright; where it is missing, a file that needs it is skipped."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import Browser as Browser
from playwright.sync_api import Locator as Locator
from playwright.sync_api import Page as Page
from playwright.sync_api import expect as expect

expect.set_options(timeout=180_000)  # milliseconds: a machine that is busy with other tests draws slowly
