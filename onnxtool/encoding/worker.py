"""A process that encodes shards of a plan as it is told by lines of JSON, and says by such lines what it has done.

`{"shards": [3, 4], "left_out": {"3": {"17": "…"}}}` is answered by a line for each batch and for each shard, and
`{"alone": 3, "begin": 17}` by one before each text of shard 3, from its 17th on, which is run by itself: of a process
that dies, the last line names the text. Either ends with `{"done": true}`, or with `{"error": …}`.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onnxtool.errors import OnnxtoolError, SessionError

if TYPE_CHECKING:
    from onnxtool.encoding.parts import ShardEncoder

Tell = Callable[[dict[str, Any]], None]


def main() -> int:
    """Do what stdin says, until it ends, or an order cannot be done."""
    tell = _own_stdout()
    orders = _orders()
    start = orders.get()
    try:
        if start["memory_bytes"]:
            _limit_memory(start["memory_bytes"])
        encoder = _open(start)
        tell({"done": True})
        while True:
            order = orders.get()
            if "alone" in order:
                _run_alone(encoder, order["alone"], order["begin"], tell)
            else:
                _encode(encoder, order, tell)
            tell({"done": True})
    except OnnxtoolError as error:  # who reads this raises it
        tell({"error": error.message, "hint": error.hint, "kind": type(error).__name__})
        return 1
    except MemoryError:
        tell({"error": "there is not enough memory", "hint": "", "kind": SessionError.__name__})
        return 1


def _orders() -> queue.SimpleQueue[dict[str, Any]]:
    """Read orders in a thread, which ends the process with stdin: whoever gave them is gone, and nobody waits."""
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return orders


def _own_stdout() -> Tell:
    """Keep stdout for answers: what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return tell


def _limit_memory(size: int) -> None:
    """Let allocations beyond so many bytes fail, where the system can: then a text is at fault, and not the machine."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _open(start: dict[str, Any]) -> ShardEncoder:
    from onnxtool.encoding.locations import parse_location
    from onnxtool.encoding.parts import PartOptions, ShardEncoder
    from onnxtool.encoding.plan import read_plan

    model_path, input_path = (start[name] and parse_location(start[name]) for name in ("model_path", "input_path"))
    options = PartOptions(model_path=model_path, input_path=input_path, workers=start["threads"])
    return ShardEncoder(read_plan(start["plan"]), options)


def _encode(encoder: ShardEncoder, order: dict[str, Any], tell: Tell) -> None:
    left_out = {
        int(number): {int(place): reason for place, reason in texts.items()}
        for number, texts in order["left_out"].items()
    }
    for number, (shard, rejects) in encoder.encode(
        order["shards"], lambda _window, count, _share: tell({"batch": count}), left_out
    ):
        tell({"shard": number, "tokens": shard.num_tokens, "rejects": len(rejects) + len(shard.rejects)})


def _run_alone(encoder: ShardEncoder, number: int, begin: int, tell: Tell) -> None:
    """Run each text of a shard by itself."""
    from onnxtool.encoding.pipeline import encode_windows
    from onnxtool.encoding.windows import Window

    documents = encoder.documents(number)
    for place, document in enumerate(documents[begin:], start=begin):
        tell({"text": place})
        window = Window((document,), number, "", 0)
        try:
            for _ in encode_windows(encoder.job.model, iter([window]), encoder.job.plan, lambda *_: None):
                pass
        except (SessionError, MemoryError) as error:
            tell({"failed": place, "reason": " ".join(str(error).split())[:200]})


if __name__ == "__main__":
    sys.exit(main())
