"""What comes before and after the model's run where it runs on texts: the tokenizer, and the way to vectors."""

from __future__ import annotations

import time

from onnxtool.benchmarking.report import StageTimes
from onnxtool.benchmarking.workload import Workload
from onnxtool.errors import InputError
from onnxtool.infer.batches import Batch
from onnxtool.infer.loading import LoadedModel
from onnxtool.runtime.timing import summarize_latencies

_BATCHES = 30  # at most
_SECONDS = 5.0


def time_stages(model: LoadedModel, workload: Workload) -> StageTimes:
    """Time tokenizing and pooling of batches as the library does them, the model's run between them left out.

    Raises:
        InputError: the model's outputs are not what its task says.
    """
    tokenize_ms: list[float] = []
    pool_ms: list[float] = []
    gives_vectors = True
    end = time.perf_counter() + _SECONDS
    for place in range(_BATCHES + 1):  # the first one allocates
        texts = workload.texts[place % len(workload.texts)]
        start = time.perf_counter()
        encoded = model.tokenize(texts)
        feeds = model.feeds(encoded)
        tokenize_ms.append((time.perf_counter() - start) * 1e3)
        if gives_vectors:
            batch = model.batch(encoded, model.session.run(feeds))
            gives_vectors = _pools(model, batch, pool_ms)
        if len(tokenize_ms) > 1 and time.perf_counter() >= end:
            break
    return StageTimes(
        tokenize=summarize_latencies(tokenize_ms[1:]),
        pool=summarize_latencies(pool_ms[1:]) if gives_vectors else None,
    )


def _pools(model: LoadedModel, batch: Batch, pool_ms: list[float]) -> bool:
    """Time pooling a batch; return whether the model is for vectors at all."""
    start = time.perf_counter()
    try:
        model.pool(batch)
    except InputError:
        return False
    pool_ms.append((time.perf_counter() - start) * 1e3)
    return True
