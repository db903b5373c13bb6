"""What artifacts for a phone say of the build of onnxruntime that they need."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnxruntime.tools.reduced_build_config_parser import parse_config

from onnxtool.training.artifacts import ArtifactReport
from onnxtool.training.artifacts.preparation import prepare_training
from onnxtool.training.options import PreparationOptions
from tests.training.small_models import convolutions

MODELS = ("training_model", "eval_model", "optimizer_model")


def prepare(tmp_path: Path, target: str) -> ArtifactReport:
    onnx.save(convolutions(), tmp_path / "forward.onnx")
    return prepare_training(PreparationOptions(tmp_path / "forward.onnx", output=tmp_path / target, target=target))


@pytest.mark.parametrize("target", ["android", "ios"])
def test_one_file_has_every_operator_of_the_models(tmp_path: Path, target: str) -> None:
    """As onnxruntime's reduced-operator tool reads it, types included, and as its lists of each model have them."""
    report = prepare(tmp_path, target)
    folder = tmp_path / target
    build = report.phone
    assert build is not None
    found, types = parse_config(str(folder / build.config), enable_type_reduction=True)
    assert types is not None
    operators = {(domain, since, name) for domain, sets in found.items() for since in sets for name in sets[since]}
    for model in MODELS:
        each, _ = parse_config(str(folder / f"{model}.required_operators.config"))
        listed = {(domain, since, name) for domain, sets in each.items() for since in sets for name in sets[since]}
        assert listed
        assert listed <= operators
    assert {"Scan", "MatMul"} <= {name for _, _, name in operators}
    assert build.num_operators == len({(domain, name) for domain, _, name in operators})
    reported = {(d, v, name) for d, sets in build.operators.items() for v, names in sets.items() for name in names}
    assert reported == operators
    assert str(tmp_path) not in (folder / build.config).read_text(encoding="utf-8")
    assert str(folder / build.config) in {file.path for file in report.files}
