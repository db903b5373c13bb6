"""`optimize --vocabulary`, against the whole model run by onnxruntime and the tokenizers library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from onnxtool import ExportOptions, OptimizeOptions, export_model, load, optimize_model
from onnxtool.checkpoint.text_files import read_texts
from onnxtool.errors import InputError, OutputExistsError, OutputWriteError, PassError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import PARTNER_KEY
from onnxtool.optimize.quantization.calibration import OWN_TEXTS
from onnxtool.optimize.report import VocabularyCut
from tests.export.text_tokenizers import CLASSES, train
from tests.generators import exported
from tests.workshop import Workshop

TEXTS = [text.contents for text in read_texts(OWN_TEXTS)]


def write_texts(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"id": str(one), "contents": text}) + "\n" for one, text in enumerate(texts)))
    return path


def cut(source: Path, output: Path, **options: Any) -> VocabularyCut:
    options = {"vocabulary": write_texts(output.with_suffix(".jsonl")), "timing": False, **options}
    found = optimize_model(OptimizeOptions(source, output=output, **options)).vocabulary
    assert found is not None
    return found


def outputs(path: Path, texts: list[str], folder: Path | None = None) -> list[NDArray[Any]]:
    """Return the first output of each text alone, by the tokenizer beside the file."""
    tokenizer = Tokenizer.from_file(str((folder or path.with_suffix("")) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(64)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names, found = [one.name for one in session.get_inputs()], []
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids])
        arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        found.append(session.run(None, {name: arrays[name] for name in names})[0])
    return found


@pytest.mark.parametrize(("precision", "width"), [("fp32", 384), ("int8", 32)])
def test_vectors_of_texts_are_equal_bit_by_bit(
    trained: Path, workshop: Workshop, tmp_path: Path, precision: str, width: int
) -> None:
    """With trained weights, after the same passes, and in int8 calibrated on the same texts, not on the default."""
    given = TEXTS if precision == "fp32" else [text[: len(text) // 3] for text in TEXTS]
    texts = write_texts(tmp_path / "texts.jsonl", given)
    whole = tmp_path / "whole.onnx"
    source = trained if precision == "fp32" else workshop.exported("tiny-encoder", exporter="torchscript")
    calibration = None if precision == "fp32" else texts
    optimize_model(
        OptimizeOptions(source, output=whole, precision=precision, calibration=calibration, timing=False, verify=False)
    )
    found = cut(source, tmp_path / "cut.onnx", vocabulary=texts, precision=precision)
    assert found.num_equal == found.num_run == len(given) == found.num_texts
    assert found.rows < found.rows_before / 4
    assert found.weight_bytes_before - found.weight_bytes == (found.rows_before - found.rows) * width * 4
    for one, two in zip(
        outputs(whole, given, source.with_suffix("")), outputs(tmp_path / "cut.onnx", given), strict=True
    ):
        np.testing.assert_array_equal(one, two)


def test_a_held_out_part_says_what_other_texts_lose(trained: Path, tmp_path: Path) -> None:
    """Every tenth text is read with the tokens of the others."""
    strange = "Ornithologists debated crepuscular nightjar vocalizations"
    texts = write_texts(tmp_path / "texts.jsonl", [strange if one % 10 == 9 else TEXTS[one] for one in range(20)])
    found = cut(trained, tmp_path / "cut.onnx", vocabulary=texts)
    assert (found.num_held_out, found.num_changed) == (2, 2)
    assert found.cosine_min is not None
    assert 0 < found.cosine_min < 0.999


def test_a_cut_file_takes_no_other_tokenizer(trained: Path, tmp_path: Path) -> None:
    """Its ids would be those of other tokens, without any error."""
    cut(trained, tmp_path / "cut.onnx")
    with pytest.raises(InputError, match="was cut, and tokenizer.json in .* is not the one"):
        load(tmp_path / "cut.onnx", model_name=trained.with_suffix(""))
    shutil.rmtree(tmp_path / "cut")
    shutil.copytree(trained.with_suffix(""), tmp_path / "cut")
    with pytest.raises(InputError, match="no tokenizer.json that was written with its vocabulary"):
        load(tmp_path / "cut.onnx")


@pytest.fixture(scope="module")
def random_models(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A RoBERTa and an XLM-R that predict masked tokens, with random weights and trained tokenizers, exported."""

    def make(folder: Path) -> None:
        import torch
        import transformers

        folder.mkdir()
        for kind in ("RoBERTa", "XLM-R"):
            tokenizer = train(kind, TEXTS)
            torch.manual_seed(0)
            config = transformers.XLMRobertaConfig(
                vocab_size=tokenizer.get_vocab_size() + 10, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=32, max_position_embeddings=80, tie_word_embeddings=kind == "RoBERTa",
            )  # fmt: skip
            saved = folder / f"{kind}-checkpoint"
            transformers.XLMRobertaForMaskedLM(config).save_pretrained(saved)
            tokenizer.save(str(saved / "tokenizer.json"))
            roles = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
            stated = {f"{role}_token": token for role, token in roles.items()} | {"tokenizer_class": CLASSES[kind]}
            (saved / "tokenizer_config.json").write_text(json.dumps(stated))
            export_model(
                ExportOptions(str(saved), output=folder / f"{kind}.onnx", exporter="torchscript", verify=False)
            )

    return workshop.made("vocabularies", make)


@pytest.mark.parametrize("kind", ["RoBERTa", "XLM-R"])
def test_logits_of_other_tokenizers_are_equal_bit_by_bit(random_models: Path, tmp_path: Path, kind: str) -> None:
    """BPE and Unigram, a tied head and one of its own, positions behind padding, and rows that no token has."""
    source = random_models / f"{kind}.onnx"
    texts = [text.replace("<", "") for text in TEXTS[::2]]
    found = cut(source, tmp_path / "cut.onnx", vocabulary=write_texts(tmp_path / "texts.jsonl", texts), verify=False)
    before, after = (
        Tokenizer.from_file(str(path.with_suffix("") / "tokenizer.json")) for path in (source, tmp_path / "cut.onnx")
    )
    assert found.rows == after.get_vocab_size() < before.get_vocab_size() == found.rows_before - 10
    columns = np.array([before.token_to_id(str(after.id_to_token(number))) for number in range(found.rows)])
    for one, two in zip(outputs(source, texts), outputs(tmp_path / "cut.onnx", texts), strict=True):
        np.testing.assert_array_equal(one[..., columns], two)
    row_bytes = 16 * 4 * (1 if kind == "RoBERTa" else 2) + 4
    assert found.weight_bytes_before - found.weight_bytes == (found.rows_before - found.rows) * row_bytes


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("blank.txt", " \n\n", "has no texts"),
        ("empty.jsonl", '{"id": "1", "contents": ""}', "the texts have no tokens"),
        ("list.json", '["hello", "nonsuch"]', "has no 'nonsuch'"),
        ("list.json", "{}", "not a JSON list of tokens"),
        ("list.json", "[", "cannot read .*: it is not JSON"),
        ("missing.json", None, "No such file"),
        ("-", "", "read twice"),
    ],
)
def test_what_names_no_tokens_is_refused(
    trained: Path, tmp_path: Path, name: str, content: str | None, match: str
) -> None:
    """Nothing would be left of the vocabulary but characters."""
    texts = Path(name) if name == "-" else tmp_path / name
    if name != "-" and content is not None:
        texts.write_text(content)
    with pytest.raises(InputError, match=match):
        cut(trained, tmp_path / "cut.onnx", vocabulary=texts)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("cut.onnx", "."))]


def test_a_list_of_tokens_is_kept(trained: Path, tmp_path: Path) -> None:
    """Texts of onnxtool's own say what other texts lose."""
    (tmp_path / "list.json").write_text(json.dumps(["hello", "##ing"]))
    found = cut(trained, tmp_path / "cut.onnx", vocabulary=tmp_path / "list.json")
    content = json.loads((tmp_path / "cut" / "tokenizer.json").read_text())
    assert {"hello", "##ing", "[MASK]", "a", "##a"} <= content["model"]["vocab"].keys()
    assert found.num_held_out == len(TEXTS)
    assert found.num_changed > 40
    settings = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert settings["vocab_size"] == found.rows == len(content["model"]["vocab"])


def test_the_tokenizer_beside_an_output_is_replaced_as_a_whole(trained: Path, tmp_path: Path) -> None:
    """A vocabulary that another tokenizer left there would be read instead of it by slow tokenizers."""
    output, stale = tmp_path / "cut.onnx", tmp_path / "cut" / "merges.txt"
    stale.parent.mkdir()
    stale.write_text("a b")
    with pytest.raises(OutputExistsError, match="merges.txt is of another tokenizer"):
        cut(trained, output, verify=False)
    cut(trained, output, verify=False, force=True)
    cut(trained, output, verify=False, force=True)  # also its own
    assert not stale.exists()
    shutil.copytree(trained.with_suffix(""), tmp_path / "minilm")
    with pytest.raises(OutputWriteError, match="would replace the whole one"):
        cut(Path(shutil.copy(trained, tmp_path / "other.onnx")), tmp_path / "minilm.onnx", force=True)


def test_files_that_share_a_tokenizer_with_others_are_refused(trained: Path, tmp_path: Path) -> None:
    """The other file would read other ids."""
    shutil.copytree(trained.with_suffix(""), tmp_path / "minilm")
    path = Path(shutil.copy(trained, tmp_path / "minilm.onnx"))
    ModelFile.open(path).stamp({PARTNER_KEY: "partner.onnx"})
    with pytest.raises(PassError, match=r"shares it with another file \(onnxtool.partner\)"):
        cut(path, tmp_path / "cut.onnx")


def test_a_language_model_with_its_cache_is_cut(workshop: Workshop, tmp_path: Path) -> None:
    """Its head, whose rows are more than the tokenizer's tokens, and inputs that no tokenizer gives."""
    texts = write_texts(tmp_path / "texts.jsonl", ["the city paris", "london is the city"])
    found = cut(exported(workshop, "llama"), tmp_path / "cut.onnx", vocabulary=texts)
    assert found.rows_before == 100
    assert found.num_equal == found.num_run == 2
    (answer,) = load(tmp_path / "cut.onnx").answer(["the city"]).answers
    assert answer
