"""A process that encodes shards of a plan as it is told by lines of JSON, and says by such lines what it has done.

`{"shards": [3, 4], "left_out": {"3": {"17": "…"}}}` is answered by a line for each batch and for each shard, and
`{"alone": 3, "begin": 17}` by one before each text of shard 3, from its 17th on, which is run by itself: of a process
that dies, the last line names the text. Either ends with `{"done": true}`, or with `{"error": …}`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onnxtool.encoding.answers import Tell, answer_orders
from onnxtool.errors import SessionError

if TYPE_CHECKING:
    from onnxtool.encoding.parts import ShardEncoder


def main() -> int:
    """Do what stdin says, until it ends, or an order cannot be done."""
    return answer_orders(_answer)


def _answer(orders: Iterator[dict[str, Any]], tell: Tell) -> None:
    start = next(orders, None)
    if start is None:
        return
    if start["memory_bytes"]:
        _limit_memory(start["memory_bytes"])
    encoder = _open(start)
    for order in orders:
        if "alone" in order:
            _run_alone(encoder, order["alone"], order["begin"], tell)
        else:
            _encode(encoder, order, tell)


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
