"""Add vectors to a Spark table: python spark_encode.py MODEL.onnx CORPUS.jsonl OUTPUT.parquet."""

import sys
from collections.abc import Iterator

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.functions import pandas_udf
from pyspark.sql.types import ArrayType, FloatType

from onnxtool.encoding import VectorOptions
from onnxtool.encoding.ray import Encoder


def encode(spark: SparkSession, model: str, corpus: str, output: str) -> None:
    """Write a collection's rows with their vectors."""

    def vectors(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        encoder = Encoder(model, VectorOptions(provider="cpu"))  # once for each partition
        for texts in batches:
            yield pd.Series(list(encoder({"contents": texts.to_numpy()})["vector"]))

    # Spark infers the kind of function from its annotations, which have to be types, not strings.
    vectors.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.Series]}
    add = pandas_udf(vectors, ArrayType(FloatType()))  # type: ignore[call-overload]
    rows = spark.read.json(corpus).where("contents is not null and trim(contents) != ''")
    rows.withColumn("vector", add("contents")).write.parquet(output)


if __name__ == "__main__":
    encode(SparkSession.builder.getOrCreate(), *sys.argv[1:4])
