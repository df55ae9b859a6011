"""The text of a check, under the names that users import."""

from sqrtdk.report.check.terminal import summary_line as summary_line
from sqrtdk.report.check.terminal import to_text as to_text
