"""A card has all figures of a release, for the hub and for people, and any edit of it is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from onnxtool.model_file.metadata import License
from onnxtool.release.card import card_text
from onnxtool.release.facts import Provenance, ReleaseFacts, first_difference
from tests.release.samples import FACTS, FILES


def test_the_hub_reads_the_metadata() -> None:
    """By its own reader: license, base model, tags and the evaluation results of each file."""
    data = ModelCard(card_text(FACTS)).data
    assert (data.license, data.base_model, data.library_name, data.pipeline_tag) == (
        "apache-2.0",
        "sentence-transformers/all-MiniLM-L6-v2",
        "onnx",
        "sentence-similarity",
    )
    assert data.tags == ["onnx", "onnxruntime"]
    results = {(one.metric_name, one.dataset_name, one.metric_value) for one in data.eval_results or ()}
    assert results == {
        ("nDCG@10 of model.onnx", "manuals", 0.8125),
        ("nDCG@10 of model_int8.onnx", "manuals", 0.8),
        ("MRR@10 of model_int8.onnx", "manuals", 0.75),
    }


def test_people_read_all_figures() -> None:
    """Verification, quality with its difference, latency with the class of CPU, digests and the command."""
    text = card_text(FACTS)
    for row in (
        "| `model_int8.onnx` | `manuals, test` | 5,123 | 500 | `nDCG@10` | 0.8000 | 0.7800 to 0.8200 | `model.onnx` |",
        "| `model.onnx` | -0.0125 (-1.54%) | -0.0200 to -0.0040 | 0.0120 |",
        "| `model.onnx` | +0.0100 (+1.35%) | 0.0010 to 0.0190 | 0.0300 |",
        "| `model.onnx` | `x86-64 with AVX512-VNNI` | 1 | 8 | 128 | 21.50 | 24.25 | 372.1 |",
        "| `model_int8.onnx` | `optimize` | `model.onnx` | 4 | 0.05 | 0.2 + 0 x largest value | 0.99810000 | 0.99 |",
        " | 0.99 | 0.0019 | `cpu` |",
        f"| `tokenizer.json` | tokenizer | - | - | 466,000 | {'c' * 64} |",
        "- Revision: `1110a243fdf4706b3f48f1d95db1a4f5529b4d41`",
        "```sh\nonnxtool release --config release.toml\n```",
    ):
        assert row in text


def test_any_changed_character_is_found() -> None:
    """Whatever it is replaced with, wherever it stands."""
    text = card_text(FACTS)
    for place in range(0, len(text), 17):
        changed = text[:place] + chr((ord(text[place]) + 1) % 128) + text[place + 1 :]
        assert first_difference(changed, text), place
    assert first_difference(text.replace("\n", "\r\n"), text)
    assert "is '| `model.onnx` | `manuals" in first_difference(text.replace("0.8125 |", "0.9125 |"), text)


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: replace(facts, versions={**facts.versions, "torch": "2.13.1"}),
        lambda facts: replace(facts, files=(replace(FILES[0], sha256="f" * 64), *FILES[1:])),
        lambda facts: replace(facts, models=(replace(facts.models[0], verification=()), facts.models[1])),
        lambda facts: replace(facts, license=License()),
    ],
)
def test_a_card_does_not_agree_with_other_facts(change: Callable[[ReleaseFacts], ReleaseFacts]) -> None:
    """Those that it shows with fewer digits included, by the digest of the record."""
    assert first_difference(card_text(FACTS), card_text(change(FACTS)))


def test_a_release_without_figures_has_a_card() -> None:
    """No section of it is empty, and an unknown license is said."""
    models = tuple(replace(model, verification=(), evaluations=(), latency=()) for model in FACTS.models)
    text = card_text(replace(FACTS, models=models, license=License(), provenance=Provenance("mine", task="fill-mask")))
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["Usage", "Files", "Provenance"]
    assert ModelCard(text).data.license == "unknown"
    assert ModelCard(text).data.base_model is None
    assert "onnxtool stats model.onnx" in text
    assert text.count("```python") == 0
    assert "\nTwo ONNX files of `mine`, exported" in text


@pytest.mark.parametrize(("inputs", "programs"), [({}, 2), ({"task_id": "int64"}, 1), ({"input_ids": "int32"}, 1)])
def test_the_program_without_onnxtool_is_only_for_what_a_tokenizer_gives(inputs: dict[str, str], programs: int) -> None:
    """Another input, or another dtype, would end it with an error."""
    model = replace(FACTS.models[0], inputs={**FACTS.models[0].inputs, **inputs})
    assert card_text(replace(FACTS, models=(model, FACTS.models[1]))).count("```python") == programs


@pytest.mark.parametrize(
    ("provider", "shown"),
    [
        ("cpu", ["InferenceSession('model.onnx', providers=['CPUExecutionProvider'])"]),
        ("cuda:1", ["providers=[('CUDAExecutionProvider', {'use_tf32': '0', 'device_id': '1'})])"]),
        ("openvino", []),  # a plugin, whose library a program has to load
    ],
)
def test_the_program_runs_on_the_provider_of_the_release(provider: str, shown: list[str]) -> None:
    """And computes there as precisely as onnxtool does."""
    text = card_text(replace(FACTS, provider=provider))
    assert [line for line in shown if line not in text] == []
    assert text.count("InferenceSession") == len(shown)
    assert text.count("CPUExecutionProvider") == (provider == "cpu")


def test_names_are_no_markup() -> None:
    """They come from checkpoints and from whoever named files."""
    name = "a`b|<script>\n# c"
    text = card_text(replace(FACTS, name=name, license=License("other", "x: [", "- y"), command="make\n```\n# d"))
    assert "<script>" not in text.split("---", 2)[2]
    assert not re.search("^# c", text.split("---", 2)[2], re.MULTILINE)
    assert "````sh\nmake\n```\n# d\n````" in text
    data = ModelCard(text).data
    assert (data.license, data.license_name, data.license_link) == ("other", "x: [", "- y")
