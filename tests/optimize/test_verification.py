"""Where a result differs from the input file, the faulty pass is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import onnxtool.optimize.run
from onnxtool.errors import VerificationError
from onnxtool.model_file import ModelFile
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.presets import PRESETS
from onnxtool.runtime.session import disabled_optimizers
from tests.workshop import Workshop


@pytest.fixture
def exported(workshop: Workshop, tmp_path: Path) -> Path:
    """A TorchScript export to optimize in a folder of its own."""
    return Path(shutil.copy(workshop.exported("tiny-encoder", exporter="torchscript"), tmp_path / "tiny.onnx"))


def spoil(model: ir.Model, _context: Context) -> Outcome:
    """Turn the first normalization around, once."""
    graph = model.graph
    weight = next(v for name, v in graph.initializers.items() if name.endswith("LayerNorm.weight"))
    if "spoiled" in model.metadata_props or weight.const_value is None:
        return Outcome(model, 0)
    model.metadata_props["spoiled"] = "yes"
    weight.const_value = ir.tensor(-np.asarray(weight.const_value.numpy()), name=weight.name)
    return Outcome(model, 1)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_the_faulty_pass_is_named(exported: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Wherever it stands among the others, with the case that shows it; no file is left."""
    others = PRESETS["cpu"][:4]  # bisection runs them again and again
    passes = (*others[:place], Pass("spoil", spoil), *others[place:])
    monkeypatch.setattr(onnxtool.optimize.run, "passes_for", lambda _provider, _precision: passes)
    with pytest.raises(VerificationError, match="differs from tiny.onnx") as failure:
        optimize_model(OptimizeOptions(exported))
    assert "the pass spoil is the first after which" in failure.value.hint
    assert sorted(path.name for path in exported.parent.iterdir()) == ["tiny.onnx"]


def test_a_file_says_how_its_session_is_to_be_set(exported: Path) -> None:
    """On the CPU onnxruntime would fuse by itself what is slower there; for CUDA nothing is held back."""
    tuned = optimize_model(OptimizeOptions(exported))
    assert disabled_optimizers(ModelFile.open(Path(tuned.output))) == ["SkipLayerNormFusion"]
    again = OptimizeOptions(Path(tuned.output), output=exported.parent / "cuda.onnx", provider="cuda", verify=False)
    assert disabled_optimizers(ModelFile.open(Path(optimize_model(again).output))) == []
