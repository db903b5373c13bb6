"""The side of a worker process: orders come as lines of JSON, and answers go back as such lines.

Orders are answered by any number of lines, of which the last one is `{"done": true}` or `{"error": …}`.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from onnxtool.errors import OnnxtoolError, SessionError

GRACE_S = 2.0
Tell = Callable[[dict[str, Any]], None]


def answer_orders(answer: Callable[[Iterator[dict[str, Any]], Tell], None]) -> int:
    """Have `answer` take orders one after the other, until stdin ends, or an order cannot be done.

    An order is done when the next one is asked for.
    """
    tell = _own_stdout()

    def orders() -> Iterator[dict[str, Any]]:
        waiting = _orders()
        while (order := waiting.get()) is not None:
            yield order
            tell({"done": True})

    try:
        answer(orders(), tell)
        return 0
    except OnnxtoolError as error:  # who reads this raises it
        tell({"error": error.message, "hint": error.hint, "kind": type(error).__name__})
    except MemoryError:
        tell({"error": "there is not enough memory", "hint": "", "kind": SessionError.__name__})
    return 1


def _orders() -> queue.SimpleQueue[dict[str, Any] | None]:
    """Read orders in a thread, and None behind them; then who still works does so for nobody, and is ended.

    Who waits for an order ends as a process does that has time to remove its temporary files.
    """
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        orders.put(None)
        time.sleep(GRACE_S)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return orders


def _own_stdout() -> Tell:
    """Keep stdout for answers: what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except BrokenPipeError:  # who gave the order is gone
            os._exit(0)

    return tell
