"""The page of a check, under the name that users import."""

from sqrtdk.report.check.html import to_html as to_html
