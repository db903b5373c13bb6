"""Bounds beyond which a number is a typing error, to protect memory and the system's threads."""

from __future__ import annotations

from typing import Annotated

from onnxtool.options import Option

MAX_THREADS = 1024
MAX_BATCH_SIZE = 65_536
MAX_SEQUENCE_LENGTH = 1 << 20
MAX_BATCH_TOKENS = 1 << 24  # 128 MB of ids
MAX_RUNS = 10_000_000
MAX_DURATION_S = 7 * 86_400.0

Threads = Annotated[int, Option("Intra-op threads; 0: one per core.", minimum=0, maximum=MAX_THREADS)]
InterThreads = Annotated[
    int, Option("Operators that may run in parallel; 0: sequential.", minimum=0, maximum=MAX_THREADS)
]
