"""The paragraphs of a comparison in Chinese."""

from sqrtdk.compare.records import DiffReport
from sqrtdk.messages import said


def paragraphs(report: DiffReport) -> list[str]:
    return [said(paragraph, "zh") for paragraph in report.paragraphs]
