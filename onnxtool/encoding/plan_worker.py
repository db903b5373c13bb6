"""A process that reads pieces of a corpus for a plan, as it is told by lines of JSON; see `onnxtool.encoding.answers`.

`{"scan": …, "folder": …}` is answered by lines with texts and bytes that were read, and by what was found;
`{"count": …}` by the number of lines of a piece.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnxtool.encoding.answers import Tell, answer_orders
from onnxtool.encoding.pieces import Piece, count_piece, scan_piece


def main() -> int:
    """Do what stdin says, until it ends, or an order cannot be done."""
    return answer_orders(_answer)


def _answer(orders: Iterator[dict[str, Any]], tell: Tell) -> None:
    for order in orders:
        if "count" in order:
            tell({"lines": count_piece(Piece.from_json(order["count"]))})
            continue
        piece, folder = Piece.from_json(order["scan"]), Path(order["folder"])
        found = scan_piece(piece, folder, lambda texts, size: tell({"texts": texts, "bytes": size}))
        tell({"found": found._asdict()})


if __name__ == "__main__":
    sys.exit(main())
