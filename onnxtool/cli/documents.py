"""A report as one JSON document."""

from __future__ import annotations

import json

from onnxtool.reports import to_json


def json_document(report: object) -> str:
    """Write `report` as JSON that no terminal obeys: whatever is not printable is an escape."""
    values = to_json(report)
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    if not all(line.isprintable() for line in text.split("\n")):
        # JSON itself escapes only some of the control characters.
        text = json.dumps(values, indent=2, ensure_ascii=True, allow_nan=False)
    return text + "\n"
