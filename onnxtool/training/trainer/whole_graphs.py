"""What holds while a model and its loss are compiled, so that they are one graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from torch._dynamo import config as dynamo_config


@contextlib.contextmanager
def whole_graphs() -> Iterator[None]:
    """Keep graphs whole under DistributedDataParallel, where TorchDynamo would cut the loss off the model.

    The price is that gradients are exchanged after the backward graph, not during it. What is not warned of are calls
    of `lru_cache` in transformers, which asks so what is installed.
    """
    with warnings.catch_warnings(), dynamo_config.patch(optimize_ddp=False):
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`-wrapped function")
        yield
