"""Facts of a release that never was, with every kind of figure."""

from __future__ import annotations

from onnxtool.evaluation.measures import Measure, MeasureDifference
from onnxtool.model_file.metadata import License
from onnxtool.release.facts import (
    EvaluationResult,
    LatencyRow,
    Provenance,
    ReleasedFile,
    ReleasedModel,
    ReleaseFacts,
    VerifiedStep,
)

EXPORTED = VerifiedStep("export", "PyTorch", 9, 1.5e-6, 1e-4, 1e-4, 0.99999994, 0.99999, "cpu")
QUANTIZED = VerifiedStep("optimize", "model.onnx", 4, 0.05, 0.2, 0.0, 0.9981, 0.99, "cpu", error=0.0019)
SEARCHED = EvaluationResult("manuals", "test", 5123, 500, {"nDCG@10": Measure(0.8125, 0.79, 0.835)})
COMPARED = EvaluationResult(
    "manuals",
    "test",
    5123,
    500,
    {"nDCG@10": Measure(0.8, 0.78, 0.82), "MRR@10": Measure(0.75, 0.7, 0.8)},
    base="model.onnx",
    differences={
        "nDCG@10": MeasureDifference(0.8125, -0.0125, -0.0154, -0.02, -0.004, 0.012, 11, 37),
        "MRR@10": MeasureDifference(0.74, 0.01, 0.0135, 0.001, 0.019, 0.03, 9, 5),
    },
)
TIMED = LatencyRow("x86-64 with AVX512-VNNI", 1, 8, 128, 21.5, 24.25, 372.1)
INPUTS = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "int64")
FILES = (
    ReleasedFile("model.onnx", "a" * 64, 90_000_000, "model", "fp32"),
    ReleasedFile("model_int8.onnx", "b" * 64, 23_000_000, "model", "int8", "chroma"),
    ReleasedFile("tokenizer.json", "c" * 64, 466_000, "tokenizer"),
)
FACTS = ReleaseFacts(
    name="all-MiniLM-L6-v2",
    provenance=Provenance(
        "sentence-transformers/all-MiniLM-L6-v2",
        is_on_hub=True,
        revision="1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
        weights_sha256="d" * 64,
        model_type="bert",
        architecture="BertModel",
        task="sentence-similarity",
        head="embedding",
        date="2026-11-23",
    ),
    license=License("apache-2.0"),
    provider="cpu",
    command="onnxtool release --config release.toml",
    versions={"onnxtool": "1.0", "onnxruntime-gpu": "1.31.1", "torch": "2.13.0"},
    files=FILES,
    signed=True,
    inputs={"checkpoint": "e" * 64, "date": "2026-11-23"},
    models=(
        ReleasedModel("model.onnx", 22_713_216, INPUTS, (EXPORTED,), (SEARCHED,), (TIMED,)),
        ReleasedModel("model_int8.onnx", 22_713_216, INPUTS, (EXPORTED, QUANTIZED), (COMPARED,)),
    ),
)
