"""Pages in Chromium."""

from tests.report.conftest import opened as opened
