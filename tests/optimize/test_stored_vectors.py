"""A model whose vectors are stored as codes or bits is optimized and verified by the vectors, and stores them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.checkpoint.pooling_modules import Normalize, Pooling
from onnxtool.checkpoint.quantized_vectors import VectorType
from onnxtool.errors import PassError, VerificationError
from onnxtool.export.heads.head import Head, append_head
from onnxtool.model_file.metadata import VECTORS_KEY
from onnxtool.model_file.weights import load_model, write_inline
from onnxtool.optimize.stored_vectors import Storage
from onnxtool.runtime.session import open_session
from tests.optimize.passes.builders import ragged_feeds
from tests.workshop import Workshop

HEAD = Head("embedding", "last_hidden_state", "sentence_embedding", "sentence-similarity", (Pooling(), Normalize()))


def _write(workshop: Workshop, path: Path, stored: VectorType | None) -> Path:
    """Write the tiny encoder with an embedding on top, stored so."""
    model = load_model(workshop.exported("tiny-encoder", exporter="torchscript"))
    append_head(model, replace(HEAD, stored=stored))
    model.metadata_props.update({} if stored is None else stored.metadata)
    write_inline(model, path)
    return path


def _run(path: Path | str) -> NDArray[Any]:
    session = open_session(Path(path), provider="cpu")
    feeds = ragged_feeds()
    return session.run({info.name: feeds[info.name] for info in session.model.structure.inputs})["sentence_embedding"]


@pytest.mark.parametrize(("name", "precision"), [("ubinary", "fp16"), ("int8", "int8")])
def test_the_vectors_are_compared_and_then_stored(
    workshop: Workshop, tmp_path: Path, name: str, precision: str
) -> None:
    """The error is that of the vectors, which precision and fusions change; the steps stay as they were."""
    floats = _run(_write(workshop, tmp_path / "floats.onnx", None))
    ranges = np.stack([floats.min(axis=0), floats.max(axis=0)]) if name.endswith("int8") else None
    stored = VectorType.of(name, ranges)
    source = _write(workshop, tmp_path / "m.onnx", stored)
    np.testing.assert_array_equal(_run(source), stored.apply(floats))
    report = optimize_model(OptimizeOptions(source, precision=precision))
    wanted = optimize_model(OptimizeOptions(tmp_path / "floats.onnx", precision=precision))
    # Both optimize the same graph: what is stored are the vectors of that one.
    np.testing.assert_array_equal(_run(report.output), stored.apply(_run(wanted.output)))
    assert report.after.num_nodes - wanted.after.num_nodes == report.before.num_nodes - wanted.before.num_nodes
    assert report.verification is not None
    assert wanted.verification is not None
    # Of vectors with such codes, the nearest is no farther away than the vector that was stored.
    assert report.verification.max_abs_error <= wanted.verification.max_abs_error + 1e-6
    assert report.verification.cosine_min >= wanted.verification.cosine_min - 1e-6
    if precision == "int8":
        assert report.quantization is not None
        assert wanted.quantization is not None
        assert report.quantization.error == pytest.approx(wanted.quantization.error)


def test_other_steps_are_found(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: here, the first number of eight becomes the lowest bit."""
    source = _write(workshop, tmp_path / "m.onnx", VectorType.of("binary"))
    put_back = Storage.put_back

    def reversed_bits(self: Storage, model: ir.Model) -> None:
        put_back(self, model)
        for value in model.graph.initializers.values():
            assert value.const_value is not None
            if value.const_value.size == 8 and value.const_value.numpy()[0] == 128:
                value.const_value = ir.tensor(value.const_value.numpy()[::-1].copy())

    monkeypatch.setattr(Storage, "put_back", reversed_bits)
    with pytest.raises(VerificationError, match="sentence_embedding"):
        optimize_model(OptimizeOptions(source))


def test_a_graph_that_does_not_show_where_it_stores_vectors_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    """Such as one whose values another tool has renamed."""
    source = _write(workshop, tmp_path / "m.onnx", VectorType.of("binary"))
    model = onnx.load(source)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["renamed" if name == f"{VECTORS_KEY}.floats" else name for name in names]
    del model.graph.value_info[:]
    onnx.save(model, source)
    with pytest.raises(PassError, match="does not show where they are made") as caught:
        optimize_model(OptimizeOptions(source))
    assert "--vectors_as" in caught.value.hint
