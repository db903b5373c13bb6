"""Encoder-decoders with a cache: two graphs that write what PyTorch writes, and broken ones are caught."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from onnxtool import ExportOptions, export_model
from onnxtool.errors import ExportError, OutputExistsError, VerificationError
from onnxtool.export.decoding.encoder_decoder import EncoderDecoder, EncoderDecoderPipeline
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.signature import Signature
from onnxtool.export.tracing import EXPORTERS, ExportStrategy
from onnxtool.model_file import ModelFile
from onnxtool.runtime.difference import TOLERANCES
from tests import generators
from tests.workshop import Workshop

CROSS = ["batch_size", 4, "sequence", 8]
PAST = ["batch_size", 4, "past_sequence", 8]
LAYERS = [f"{layer}.{{}}.{part}" for layer in range(2) for part in ("key", "value")]


def report(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path.parent / "report.json").read_text())
    return content


@pytest.fixture(scope="module", params=["t5", "bart"])
def written(request: pytest.FixtureRequest, workshop: Workshop) -> Path:
    return generators.exported(workshop, request.param)


def test_the_decoder_takes_keys_and_values_and_never_the_states_of_the_encoder(written: Path) -> None:
    """Cross attention is computed by the encoder's graph, once; the decoder gives back what grows."""
    found = report(written)
    assert found["inputs"] == {
        "input_ids": ["batch_size", "decoder_sequence"],
        "encoder_attention_mask": ["batch_size", "sequence"],
        **{f"past_key_values.{name.format('decoder')}": PAST for name in LAYERS},
        **{f"past_key_values.{name.format('encoder')}": CROSS for name in LAYERS},
    }
    grown = ["batch_size", 4, "past_sequence + decoder_sequence", 8]
    assert found["outputs"] == {
        "logits": ["batch_size", "decoder_sequence", 40],
        **{f"present.{name.format('decoder')}": grown for name in LAYERS},
    }
    encoder = ModelFile.open(written.with_name(f"{written.stem}-encoder.onnx"))
    assert [info.name for info in encoder.structure.inputs] == ["input_ids", "attention_mask"]
    assert {info.name: list(info.shape) for info in encoder.structure.outputs} == {
        f"present.{name.format('encoder')}": CROSS for name in LAYERS
    }


def test_the_files_name_each_other(written: Path) -> None:
    """And what bounds texts and answers: T5 counts no positions, and is verified so far; BART has a table of them."""
    decoder, encoder = ModelFile.open(written), ModelFile.open(written.with_name(f"{written.stem}-encoder.onnx"))
    assert decoder.metadata["onnxtool.encoder"] == encoder.path.name
    assert encoder.metadata["onnxtool.decoder"] == decoder.path.name
    assert decoder.metadata.get("onnxtool.max_decoder_length") == {"bart": "64", "t5": "1024"}[written.stem]
    assert encoder.metadata["onnxtool.task"] == decoder.metadata["onnxtool.task"] == generators.ENCODER_DECODER
    assert [step["verified"] for file in (decoder, encoder) for step in file.steps] == [True, True]


def test_it_is_verified_on_texts_of_all_lengths(written: Path) -> None:
    """Padding on either side, and other words under it; and the mask is shown to matter."""
    cases = report(written)["cases"]
    assert {"a long text, 64 tokens", "ragged, padded left", "real text"} <= set(cases)
    assert "ragged, padded right, other ids in the padding" in cases
    assert report(written)["mask_effect"] > 0.1


def test_prompts_of_the_decoder_may_come_in_pieces(written: Path, workshop: Workshop) -> None:
    """Three tokens, one and two onto an empty cache give the logits that the model gives to all six at once."""
    generator = np.random.default_rng(0)
    texts = generator.integers(5, 15, (3, 9))
    mask = (np.arange(9)[None] < np.array([[9], [4], [1]])).astype(np.int64)
    ids = generator.integers(5, 15, (3, 6))
    model = generators.make_model(written.stem)
    with torch.inference_mode():
        wanted = model(
            input_ids=torch.from_numpy(texts), attention_mask=torch.from_numpy(mask),
            decoder_input_ids=torch.from_numpy(ids), use_cache=False,
        ).logits.numpy()  # fmt: skip
    encoder = onnxruntime.InferenceSession(written.with_name(f"{written.stem}-encoder.onnx"))
    decoder = onnxruntime.InferenceSession(written)
    states = encoder.run(None, {"input_ids": texts, "attention_mask": mask})
    names = (output.name.replace("present", "past_key_values") for output in encoder.get_outputs())
    cross = dict(zip(names, states, strict=True))
    past = {f"past_key_values.{name.format('decoder')}": np.zeros((3, 4, 0, 8), np.float32) for name in LAYERS}
    found = []
    for piece in np.split(ids, [3, 4], axis=1):
        logits, *after = decoder.run(None, {"input_ids": piece, "encoder_attention_mask": mask, **past, **cross})
        past = dict(zip(past, after, strict=True))
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), wanted, atol=1e-4)


def test_a_decoder_of_one_token_at_a_time_says_so(workshop: Workshop) -> None:
    """FSMT reads the last token alone where it has a cache."""
    path = generators.exported(workshop, "fsmt")
    assert report(path)["inputs"]["input_ids"] == ["batch_size", 1]
    assert any("itself takes one size only: decoder_sequence 1" in note for note in report(path)["notes"])


def pipeline(workshop: Workshop) -> EncoderDecoderPipeline:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(generators.checkpoint(workshop, "t5"))
    texts = TextInputs.of(generators.make_model("t5"), tokenizer, ("input_ids", "attention_mask"))
    return EncoderDecoderPipeline(
        texts, Signature({}, {}), start_id=0, in_parallel=True, longest=79, vocabulary_size=40, default_attention=None,
        is_verified=True,
    )  # fmt: skip


@pytest.mark.parametrize("broken", ["t5.onnx", "t5-encoder.onnx"])
def test_another_weight_in_either_file_is_caught(broken: str, workshop: Workshop, tmp_path: Path) -> None:
    """The files are compared with the model that they should be."""
    source = generators.exported(workshop, "t5").parent
    for name in ("t5.onnx", "t5-encoder.onnx"):
        model = onnx.load(source / name)
        if name == broken:
            tensor = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.5, tensor.name))
        onnx.save(model, tmp_path / name)
    outputs = pipeline(workshop).reference_outputs(generators.make_model("t5"), ExportStrategy(EXPORTERS[0], None))
    with pytest.raises(VerificationError, match="differs from PyTorch"):
        pipeline(workshop).verify(tmp_path / "t5.onnx", outputs, TOLERANCES["fp32"])


def test_a_decoder_that_reads_the_encoder_beside_its_cache_is_refused(workshop: Workshop) -> None:
    """Its file would have to take the states as well; a cache that does not stand for its tokens is refused too."""
    model = generators.make_model("t5")
    feeds = {"input_ids": np.full((2, 5), 7), "attention_mask": np.ones((2, 5), np.int64)}
    forward = model.forward

    def reading(**arguments: Any) -> Any:
        outputs = forward(**arguments)
        states = arguments.get("encoder_outputs")
        if states is not None:
            outputs.logits = outputs.logits + states.last_hidden_state.mean()
        return outputs

    model.forward = reading
    with pytest.raises(ExportError, match="reads the encoder's states in addition to its cache"):
        EncoderDecoder.of(model, feeds, 0)

    def forgetting(**arguments: Any) -> Any:
        if (cache := arguments.get("past_key_values")) is not None and cache.get_seq_length():
            cache.self_attention_cache.layers[0].values.zero_()
        return forward(**arguments)

    model.forward = forgetting
    with pytest.raises(ExportError, match="does not represent the preceding tokens"):
        EncoderDecoder.of(model, feeds, 0)


def test_an_encoder_that_is_there_is_not_replaced_without_force(workshop: Workshop, tmp_path: Path) -> None:
    """It is looked for before any work is done."""
    (tmp_path / "t5-encoder.onnx").write_text("somebody's")
    options = ExportOptions(
        str(generators.checkpoint(workshop, "t5")), output=tmp_path / "t5.onnx", task=generators.ENCODER_DECODER
    )
    with pytest.raises(OutputExistsError, match=r"t5-encoder\.onnx exists already"):
        export_model(options)
    assert [path.name for path in tmp_path.iterdir()] == ["t5-encoder.onnx"]


def test_a_model_without_an_encoder_takes_the_place_of_both_files(workshop: Workshop, tmp_path: Path) -> None:
    """An encoder that nothing names any more would be run with the next decoder; a file of another name stays."""
    name = str(generators.checkpoint(workshop, "t5"))
    written = generators.exported(workshop, "t5")
    for file in (written, written.with_name("t5-encoder.onnx")):
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "other-encoder.onnx").write_text("somebody's")
    task, place = "text2text-generation", tmp_path / "t5.onnx"
    export_model(ExportOptions(name, output=place, task=task, exporter="torchscript", force=True, verify=False))
    assert sorted(path.name for path in tmp_path.glob("*.onnx")) == ["other-encoder.onnx", "t5.onnx"]
