"""Add vectors to a Ray Data table: python ray_encode.py MODEL.onnx CORPUS.jsonl OUTPUT."""

import sys

import ray

from onnxtool.encoding import VectorOptions
from onnxtool.encoding.ray import Encoder


def encode(model: str, corpus: str, output: str, workers: int = 2) -> None:
    """Write a collection's rows with their vectors."""
    rows = ray.data.read_json(corpus).map_batches(
        Encoder,
        fn_constructor_args=(model, VectorOptions(provider="cpu")),
        compute=ray.data.ActorPoolStrategy(size=workers),
        batch_size=1024,
        num_cpus=1,  # an actor encodes one batch at a time, on this many cores
    )
    rows.write_parquet(output)


if __name__ == "__main__":
    encode(*sys.argv[1:4])
