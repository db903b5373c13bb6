"""A folder holds each file that its consumer opens, verified, and says what each precision costs."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from onnxtool import ExportOptions, export_model, export_variants
from onnxtool.errors import ExportError, OptionError, PassError, TargetError, VerificationError
from onnxtool.export.targets import TARGETS
from onnxtool.model_file import ModelFile, save_model
from onnxtool.release import VariantsReport, check_release, make_release, read_config
from tests.workshop import Workshop

BROWSER = "fp32,fp16,int8,uint8,int4,int4_fp16"
NAMES = {"model.onnx", *TARGETS["transformers.js"].variant_names}
TEXTS = ("a cat sits on the mat", "berlin", "the train leaves at noon, if nothing happens", "word " * 100, "x y " * 31)
# Operators that onnxruntime-web lacks on the CPU in its build for WebGPU, which Transformers.js loads.
MISSING_IN_BROWSERS = {"GatherBlockQuantized"}
traced = partial(ExportOptions, exporter="torchscript")  # in a tenth of the time


@pytest.fixture(scope="module")
def exported(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, VariantsReport]:
    """A folder for Transformers.js in all precisions, and the report."""
    folder = tmp_path_factory.mktemp("browser") / "m"
    checkpoint = workshop.checkpoint("tiny-encoder")
    options = traced(checkpoint, target="transformers.js", output=folder, precisions=BROWSER)
    return folder, export_variants(options)


def ids_as_cut(folder: Path, text: str) -> list[int]:
    """Return the ids that Transformers.js feeds: those of the whole text, cut at the tokenizer's limit."""
    limit = json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [int(token) for token in tokenizer.encode(text).ids[:limit]]


def run(path: Path, ids: list[int]) -> NDArray[np.float32]:
    """Return the states of one text: float32 [S, H]."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    row = np.array([ids], np.int64)
    feeds = {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}
    states: NDArray[np.float32] = session.run(None, feeds)[0][0]
    return states


def own_states(checkpoint: Path, text: str) -> NDArray[Any]:
    """Return PyTorch's states of a text as the checkpoint's tokenizer cuts it: float32 [S, H]."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, model_max_length=64)
    tokens = tokenizer(text, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        states: NDArray[Any] = AutoModel.from_pretrained(checkpoint).eval()(**tokens).last_hidden_state[0].numpy()
    return states


def test_a_text_that_the_consumer_cuts_bluntly_ends_with_its_closing_token(
    exported: tuple[Path, VariantsReport], workshop: Workshop
) -> None:
    """In the graph, since Transformers.js cuts ids that have their special tokens already."""
    folder, checkpoint = exported[0], workshop.checkpoint("tiny-encoder")
    cut = [len(ids_as_cut(folder, text)) for text in TEXTS]
    assert max(cut) == 64  # of which some were longer
    for text in TEXTS:
        states = run(folder / "onnx" / "model.onnx", ids_as_cut(folder, text))
        np.testing.assert_allclose(states, own_states(checkpoint, text), atol=1e-4)


def test_only_the_last_of_as_many_tokens_as_the_limit_is_replaced(exported: tuple[Path, VariantsReport]) -> None:
    """Not a token in a shorter or longer row, and not padding."""
    path = exported[0] / "onnx" / "model.onnx"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def states(length: int, last: int, masked: int = 0) -> NDArray[np.float32]:
        row = np.full((1, length), 7, np.int64)
        row[0, -1] = last
        mask = np.ones_like(row)
        mask[0, length - masked :] = 0
        feeds = {"input_ids": row, "attention_mask": mask, "token_type_ids": np.zeros_like(row)}
        found: NDArray[np.float32] = session.run(None, feeds)[0]
        return found

    assert np.array_equal(states(64, 9), states(64, 102))
    assert not np.array_equal(states(63, 9), states(63, 102))
    assert not np.array_equal(states(64, 9, masked=1)[:, -1], states(64, 102, masked=1)[:, -1])


def test_all_files_are_there_and_compute_what_the_export_does(exported: tuple[Path, VariantsReport]) -> None:
    """Within the error that is stated for each; those of 8 bits have the same bytes under two names."""
    folder, report = exported
    assert {path.name for path in (folder / "onnx").iterdir()} == NAMES
    assert [one.precision for one in report.variants] == ["fp16", "int8", "uint8", "int4", "int4_fp16"]
    for text in TEXTS:
        ids = ids_as_cut(folder, text)
        wanted = run(folder / "onnx" / "model.onnx", ids).astype(np.float64)
        for one in report.variants:
            for name in one.files:
                found = run(folder / "onnx" / name, ids).astype(np.float64)
                cosines = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
                assert one.error is not None
                assert 1 - cosines.min() < 4 * one.error + 1e-6  # other texts than those that it was measured on


def test_the_card_states_size_and_error_of_each_file(exported: tuple[Path, VariantsReport]) -> None:
    """As the report does, and as the files are."""
    folder, report = exported
    card = (folder / "README.md").read_text()
    rows = dict(re.findall(r"^\| (\S+\.onnx) \| (.*) \|$", card, re.MULTILINE))
    assert set(rows) == NAMES
    for one in report.variants:
        for name in one.files:
            size = (folder / "onnx" / name).stat().st_size
            assert rows[name] == f"{one.precision} | {size / 1e6:.1f} | 1 - cosine at most {one.error:.2g}"
            assert one.size_bytes == size


def test_a_card_does_not_call_verified_what_was_not_compared(workshop: Workshop, tmp_path: Path) -> None:
    """Neither the export nor the files beside it."""
    checkpoint, folder = workshop.checkpoint("tiny-encoder"), tmp_path / "m"
    report = export_variants(traced(checkpoint, target="vespa", output=folder, precisions="fp16", verify=False))
    assert report.variants[0].verification is None
    card = (folder / "README.md").read_text()
    assert "| the export, not verified |" in card
    assert "| not measured |" in card


def test_browsers_have_the_operators_and_the_precisions_are_what_they_say(
    exported: tuple[Path, VariantsReport],
) -> None:
    """Weights of MatMulNBits have 4 or 8 bits, with scales of the precision of the rest."""
    for name in NAMES:
        model = onnx.load(exported[0] / "onnx" / name)
        assert not {node.op_type for node in model.graph.node} & MISSING_IN_BROWSERS
        types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        scales = Counter(types[node.input[2]] for node in model.graph.node if node.op_type == "MatMulNBits")
        wanted = {"model_q4.onnx": onnx.TensorProto.FLOAT, "model_q4f16.onnx": onnx.TensorProto.FLOAT16}.get(name)
        assert set(scales) == ({wanted} if wanted else set())


def test_the_default_opens_a_file_that_is_there(workshop: Workshop, tmp_path: Path) -> None:
    """In a browser that would be model_quantized.onnx; a file of an earlier export does not stay beside a new graph."""
    options = traced(workshop.checkpoint("tiny-encoder"), target="transformers.js", output=tmp_path / "m")
    export_variants(ExportOptions(**{**vars(options), "precisions": "int8"}))
    (tmp_path / "m" / "README.md").write_text("# Mine\n" + (tmp_path / "m" / "README.md").read_text() + "The end.\n")
    config = tmp_path / "m" / "config.json"
    assert "transformers.js_config" not in json.loads(config.read_text())
    assert (tmp_path / "m" / "onnx" / "model_quantized.onnx").is_file()
    export_variants(ExportOptions(**{**vars(options), "precisions": "fp16", "force": True}))
    assert json.loads(config.read_text())["transformers.js_config"] == {"dtype": "fp32"}
    assert {path.name for path in (tmp_path / "m" / "onnx").iterdir()} == {"model.onnx", "model_fp16.onnx"}
    card = (tmp_path / "m" / "README.md").read_text()
    assert card.startswith("# Mine\n")
    assert card.endswith("The end.\n")
    assert "model_quantized.onnx" not in card
    export_model(ExportOptions(**{**vars(options), "force": True}))
    assert {path.name for path in (tmp_path / "m" / "onnx").iterdir()} == {"model.onnx"}
    assert (tmp_path / "m" / "README.md").read_text() == "# Mine\n# m\n\nThe end.\n"


def test_unsigned_weights_are_the_same_numbers(exported: tuple[Path, VariantsReport]) -> None:
    """Shifted by 128 as their zero points are, and so the answers of the file in int8, bit by bit."""
    files = [exported[0] / "onnx" / name for name in ("model_int8.onnx", "model_uint8.onnx")]
    signed, unsigned = (
        {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(file).graph.initializer} for file in files
    )
    shifted = [name for name, array in unsigned.items() if array.dtype == np.uint8 and signed[name].dtype == np.int8]
    assert sum(signed[name].ndim == 2 for name in shifted) == 12  # six in each of two layers
    for name in shifted:
        np.testing.assert_array_equal(unsigned[name].astype(int) - 128, signed[name])
    for text in TEXTS:
        first, second = (run(file, ids_as_cut(exported[0], text)) for file in files)
        np.testing.assert_array_equal(first, second)


def test_weights_in_a_file_of_their_own_have_the_name_that_the_consumer_looks_for(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it opens only where config.json announces it; those of other precisions are refused."""
    folder, onnx_folder = tmp_path / "m", tmp_path / "m" / "onnx"
    onnx_folder.mkdir(parents=True)
    (onnx_folder / "model.onnx_data").write_text("of an earlier export")
    options = traced(workshop.checkpoint("tiny-encoder"), target="transformers.js", output=folder, force=True)
    for step in ("export.run", "optimize.attempt"):
        monkeypatch.setattr(f"onnxtool.{step}.MAX_INLINE_BYTES", 1000)
    export_model(options)
    assert {path.name for path in onnx_folder.iterdir()} == {"model.onnx", "model.onnx_data"}
    assert ModelFile.open(onnx_folder / "model.onnx").external_locations == ("model.onnx_data",)
    settings = json.loads((folder / "config.json").read_text())["transformers.js_config"]
    assert settings == {"dtype": "fp32", "use_external_data_format": {"model.onnx": 1}}
    assert run(onnx_folder / "model.onnx", [101, 102]).shape == (2, 32)
    with pytest.raises(TargetError, match=r"weights of model_fp16.onnx need a file of their own"):
        export_variants(
            ExportOptions(**{**vars(options), "precisions": "fp16", "verify": False, "exporter": "torchscript"})
        )


def test_a_fault_between_conversion_and_file_leaves_no_folder(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the bound on the error, a fifth of which it takes, allows it."""

    def save(model: Any, staging: Any, **options: Any) -> Path:
        path = save_model(model, staging, **options)
        written = onnx.load(path)
        scale = next(one for one in written.graph.initializer if "value" in one.name and one.name.endswith("_scale"))
        array = onnx.numpy_helper.to_array(scale) * np.where(np.arange(scale.dims[0]) == 3, 4, 1).astype(np.float32)
        scale.CopyFrom(onnx.numpy_helper.from_array(array, scale.name))
        onnx.save(written, path)
        return path

    monkeypatch.setattr("onnxtool.optimize.attempt.save_model", save)
    options = traced(workshop.checkpoint("tiny-encoder"), target="infinity", output=tmp_path / "m")
    with pytest.raises(PassError, match="in the file is off by .* from the one that it was made from"):
        export_variants(ExportOptions(**{**vars(options), "precisions": "int8"}))
    assert not (tmp_path / "m").exists()


def test_nothing_is_left_of_a_folder_whose_second_file_fails(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is another exporter tried."""
    asked: list[Any] = []

    def fail(options: Any) -> None:
        asked.append(options)
        raise VerificationError("it differs", "", None)  # type: ignore[arg-type]

    monkeypatch.setattr("onnxtool.release.variants.optimize_model", fail)
    options = traced(
        workshop.checkpoint("tiny-encoder"), target="transformers.js", output=tmp_path / "m", precisions="fp16"
    )
    with pytest.raises(VerificationError, match="it differs"):
        export_variants(options)
    assert len(asked) == 1
    assert list(tmp_path.rglob("*.onnx")) == []


def test_sentence_transformers_opens_the_names_that_its_own_functions_give(workshop: Workshop, tmp_path: Path) -> None:
    """By `file_name`, and their vectors are near those of the default."""
    from sentence_transformers import SentenceTransformer

    import onnxtool.sentence_transformers  # noqa: F401  what runs the files

    folder = tmp_path / "m"
    checkpoint = workshop.checkpoint("tiny-encoder")
    export_variants(traced(checkpoint, target="sentence-transformers", output=folder, precisions="fp32,int8"))
    wanted = SentenceTransformer(str(folder)).encode(list(TEXTS))
    for name, error in (("model_O2.onnx", 1e-6), ("model_qint8_avx512_vnni.onnx", 0.02)):
        model = SentenceTransformer(str(folder), model_kwargs={"file_name": name})
        found = model.encode(list(TEXTS))
        cosines = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
        assert 1 - cosines.min() < error


@pytest.mark.parametrize(
    ("target", "name", "precisions", "message"),
    [
        (
            "transformers.js",
            "tiny-encoder",
            "bf16",
            "opens no file in 'bf16' .*, but in fp32, fp16, int8, uint8, int4, int4_fp16",
        ),
        ("chroma", "tiny-encoder", "int8", "opens no file in 'int8' .*: it opens a single file"),
        ("plain", "tiny-encoder", "int8", "onnxtool opens no file in 'int8' "),
        ("fastembed", "tiny-splade", "int8", "fastembed opens model.onnx alone for sparse encoders"),
    ],
)
def test_what_a_consumer_would_not_open_is_refused(
    workshop: Workshop, tmp_path: Path, target: str, name: str, precisions: str, message: str
) -> None:
    """With nothing written."""
    output = tmp_path / ("m.onnx" if target == "plain" else "m")
    options = traced(workshop.checkpoint(name), target=target, output=output, precisions=precisions)
    with pytest.raises(TargetError, match=message):
        export_variants(options)
    assert list(tmp_path.iterdir()) == []


def test_a_bound_that_no_int8_keeps_leaves_no_folder(workshop: Workshop, tmp_path: Path) -> None:
    """The option of the command that the hint names is there."""
    options = traced(
        workshop.checkpoint("tiny-encoder"), target="infinity", output=tmp_path / "m", precisions="int8", max_error=1e-9
    )
    with pytest.raises(PassError) as caught:
        export_variants(options)
    assert "--max_error" in str(caught.value.hint)
    assert not (tmp_path / "m").exists()
    with pytest.raises(OptionError, match="--max_error bounds the files of --precisions"):
        ExportOptions("m", max_error=0.1)


def test_a_checkpoint_keeps_its_own_files(workshop: Workshop, tmp_path: Path) -> None:
    """A consumer that needs other settings gets another folder."""
    own = shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "m")
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    with pytest.raises(TargetError, match="for Transformers.js, files of .* itself would change") as caught:
        export_model(traced(own, target="transformers.js", output=own, force=True))
    assert "not the checkpoint's own folder" in str(caught.value.hint)
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before


def test_an_export_alone_writes_no_further_precisions(workshop: Workshop, tmp_path: Path) -> None:
    """It would need the optimizer; the error names the function that does."""
    options = traced(
        workshop.checkpoint("tiny-encoder"), target="transformers.js", output=tmp_path / "m", precisions="fp16"
    )
    with pytest.raises(ExportError) as caught:
        export_model(options)
    assert "export_variants" in str(caught.value.hint)


def test_a_release_has_the_files_that_a_consumer_opens_in_its_precisions(workshop: Workshop, tmp_path: Path) -> None:
    """Made with the options of the release for each."""
    (tmp_path / "release.toml").write_text(
        f'checkpoint = "{workshop.checkpoint("tiny-encoder")}"\noutput = "out"\nprecisions = ["fp32", "int8"]\n'
        'targets = ["transformers.js", "milvus"]\n[optimize]\nmax_error = 0.05\nactivations = "dynamic"\n'
    )
    make_release(read_config(tmp_path / "release.toml"))
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.onnx")}
    inside = {f"transformers.js/onnx/{name}" for name in ("model.onnx", "model_quantized.onnx", "model_int8.onnx")}
    assert files == {"tiny-encoder.onnx", "tiny-encoder-int8.onnx", "milvus/model.onnx", *inside}
    step = ModelFile.open(tmp_path / "out" / "transformers.js" / "onnx" / "model_int8.onnx").steps[-1]
    assert step["precision"] == "int8"
    assert not (tmp_path / "out" / "milvus" / "README.md").exists()  # of a single file, it would say nothing
    assert check_release(tmp_path / "out").passed
