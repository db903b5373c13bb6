"""sentence-transformers, by the class that the folder names, or by its ONNX backend where there is optimum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentence_transformers
from exchange import Model, Row, nonzero, pairs

PACKAGE = "sentence-transformers"
_CLASSES = {
    "text encoders": "SentenceTransformer",
    "sparse encoders": "SparseEncoder",
    "inference-free sparse encoders": "SparseEncoder",
    "late-interaction encoders": "MultiVectorEncoder",
}


def open_model(job: dict[str, Any], file: str) -> Model:
    """Open the folder; `file_name` names a file."""
    arguments: dict[str, Any] = {"file_name": file} if file else {}
    if job["consumer"] == "optimum":
        backend, arguments = "onnx", {"provider": "CPUExecutionProvider", "export": False, **arguments}
        if "file_name" in arguments:
            arguments["file_name"] = Path(file).name
    else:
        backend = "torch"
        import onnxtool.sentence_transformers  # noqa: F401  it registers the class that the folder names
    name = _CLASSES.get(job["kind"], "CrossEncoder")
    model = getattr(sentence_transformers, name)(
        job["folder"], backend=backend, device="cpu", model_kwargs=arguments, local_files_only=True
    )

    def run(texts: Sequence[str], batch_size: int, role: str) -> list[Row]:
        if name == "CrossEncoder":
            inputs: Any = pairs(job, texts) if job["question"] else list(texts)
            logits = {"activation_fn": lambda logits: logits} if job["kind"] == "text classifiers" else {}
            scores = model.predict(inputs, batch_size=batch_size, convert_to_numpy=True, **logits)
            return scores.reshape(len(texts), -1).tolist()  # type: ignore[no-any-return]
        encode = getattr(model, f"encode_{role}" if role else "encode")
        vectors = encode(list(texts), batch_size=batch_size)
        if name == "SparseEncoder":
            return [nonzero(row) for row in vectors.to_dense().numpy()]
        return [row.tolist() for row in vectors]

    return run
