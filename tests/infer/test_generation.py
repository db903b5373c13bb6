"""Models that write: greedily as `generate` of transformers, by every setting of a checkpoint that is followed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.errors import InputError, ModelFileError, OnnxtoolError
from onnxtool.infer import GenerateOptions, LoadedModel, generate, load
from onnxtool.infer.generation.processors import TextBounds, choose, processors_for
from onnxtool.infer.generation.settings import GenerationSettings
from onnxtool.infer.generation.writing import Writer
from tests import generators
from tests.infer.tiny_models import TEXTS
from tests.workshop import Workshop

TOKENS = {"eos_token_id": 3, "pad_token_id": 0, "bos_token_id": 2, "decoder_start_token_id": 3}
# What is written differs from what is written without, for one of the models at least; see the test.
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "ends": {"eos_token_id": [3, *range(20, 40)]},
    "max_length": {"max_length": 11},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": [*range(10, 40)]},
    "min_length": {"min_length": 9, "eos_token_id": [*range(10, 40)], "max_new_tokens": 9},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[number] for number in range(20, 30)] + [[30, 31], [3]]},
    "suppress_tokens": {"suppress_tokens": list(range(5, 20))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(5, 30))},
    "forced_eos_token_id": {"forced_eos_token_id": 3, "max_new_tokens": 6},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True},
    "exponential decay": {"exponential_decay_length_penalty": [2, 2.5]},
}
WITH_ENCODER: dict[str, dict[str, Any]] = {
    "forced_bos_token_id": {"forced_bos_token_id": 17, "begin_suppress_tokens": list(range(5, 30))},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.9},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
}
ROWS = [
    *(("t5", key) for key in SETTINGS),
    *(("llama", key) for key in ("as it is", "ends", "max_length", "min_length", "repetition_penalty")),
    *(("t5", key) for key in WITH_ENCODER),
    *(("bart", "as it is"), ("fsmt", "as it is")),
]


@pytest.fixture(scope="module")
def loaded(workshop: Workshop) -> dict[str, LoadedModel]:
    """The models that write, each loaded once."""
    return {name: load(generators.exported(workshop, name)) for name in ("t5", "bart", "fsmt", "llama")}


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {name: generators.make_model(name) for name in ("t5", "bart", "fsmt", "llama")}


def with_settings(model: LoadedModel, folder: Path, settings: Mapping[str, Any]) -> LoadedModel:
    """Return a model whose checkpoint says this of how it writes."""
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return replace(model, folder=CheckpointFolder(folder))


def expected(model: Any, ids: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return what `generate` writes after one text."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(**settings)
    inputs = torch.tensor([ids])
    with torch.inference_mode():
        (written,) = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs)).tolist()
    return tuple(written[1:] if model.config.is_encoder_decoder else written[len(ids) :])


@pytest.mark.parametrize(("name", "key"), ROWS)
def test_it_writes_what_generate_writes(
    name: str, key: str, loaded: dict[str, LoadedModel], references: dict[str, Any], tmp_path: Path
) -> None:
    """Token for token, after texts of several lengths at once, under each setting."""
    settings = {"max_new_tokens": 8, **TOKENS, **(SETTINGS | WITH_ENCODER)[key]}
    if "max_length" in settings:
        del settings["max_new_tokens"]
    report = Writer(with_settings(loaded[name], tmp_path, settings)).write(TEXTS[:2])
    found = [answer.token_ids for answer in report.answers]
    read = loaded[name].tokenize(TEXTS[:2])
    assert found == [expected(references[name], text.ids, settings) for text in read]
    assert report.num_generated == sum(map(len, found))
    if key != "as it is" and key not in ("renormalize_logits",):
        plain = Writer(with_settings(loaded[name], tmp_path, {"max_new_tokens": 8, **TOKENS})).write(TEXTS[:2])
        assert found != [answer.token_ids for answer in plain.answers]


SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_k, as it is": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_k": 0, "top_p": 0.7},
    "min_p": {"top_k": 0, "min_p": 0.2},
    "typical_p": {"top_k": 0, "typical_p": 0.5},
    "epsilon_cutoff": {"top_k": 0, "epsilon_cutoff": 0.02},
    "eta_cutoff": {"top_k": 0, "eta_cutoff": 0.05},
    "sequence_bias": {"top_k": 0, "sequence_bias": [[[7], 2.5], [[5, 6], -3.0], [[9, 6], 4.0]]},
    "all": {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "renormalize_logits": True},
}


@pytest.mark.parametrize("key", SAMPLING)
def test_scores_are_those_that_transformers_draws_from(key: str, references: dict[str, Any], tmp_path: Path) -> None:
    """Every rule of sampling, on scores over more tokens than top_k leaves."""
    from transformers import GenerationConfig

    settings = {**TOKENS, "do_sample": True, **SAMPLING[key]}
    model = references["t5"]
    config = GenerationConfig(**{"top_k": 50, **settings})
    model._prepare_special_tokens(config)
    tokens = np.array([3, 8, 5, 6, 9])
    theirs = model._get_logits_processor(config, input_ids_seq_length=1)
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    own = GenerationSettings.of(CheckpointFolder(tmp_path), GenerateOptions(), 80)
    rules = processors_for(own, TextBounds(1, 20, None))
    generator = np.random.default_rng(0)
    for _ in range(5):
        scores = generator.normal(0, 2, 80).astype(np.float32)
        wanted = theirs(torch.from_numpy(tokens)[None], torch.from_numpy(scores.copy())[None])[0].numpy()
        found = scores
        for rule in rules:
            found = rule(tokens, found)
        np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))
        np.testing.assert_allclose(found[~np.isinf(found)], wanted[~np.isinf(wanted)], rtol=1e-5, atol=1e-6)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """And never one whose score is minus infinity."""
    scores = np.log(np.array([0.5, 0.3, 0.2, 1e-30], np.float32))
    scores[3] = -np.inf
    settings, generator = GenerationSettings(do_sample=True), np.random.default_rng(0)
    drawn = np.bincount([choose(scores, settings, generator) for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(drawn, [0.5, 0.3, 0.2, 0], atol=0.03)


def test_what_is_drawn_depends_on_the_seed_and_on_no_other_text(loaded: dict[str, LoadedModel]) -> None:
    """A text by itself is answered as among others."""
    options = GenerateOptions(max_new_tokens=8, decoding="sample", seed=5)
    together = Writer(loaded["llama"], options).write(TEXTS).answers
    assert Writer(loaded["llama"], options).write(TEXTS[:1]).answers[0] == together[0]
    assert Writer(loaded["llama"], options).write(TEXTS[1:], first=1).answers == together[1:]
    assert Writer(loaded["llama"], replace(options, seed=6)).write(TEXTS).answers != together


def test_a_stop_ends_an_answer_and_is_no_part_of_it(loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    """What is streamed is the answer, without the beginning of a stop that came."""
    model = with_settings(loaded["llama"], tmp_path, {"suppress_tokens": [*range(5), *range(15, 100)]})  # words alone
    plain = Writer(model, GenerateOptions(max_new_tokens=12)).write(TEXTS[:2]).answers
    stop = plain[0].generated.split()[2]
    pieces: dict[int, str] = {}

    def collect(number: int, piece: str) -> None:
        pieces[number] = pieces.get(number, "") + piece

    answers = Writer(model, GenerateOptions(max_new_tokens=12, stop=(stop,))).write(TEXTS[:2], on_text=collect).answers
    assert answers[0].finish_reason == "stop"
    assert answers[0].generated == plain[0].generated[: plain[0].generated.index(stop)]
    assert [pieces.get(number, "") for number in range(2)] == [answer.generated for answer in answers]


def test_a_message_is_put_into_the_chat_template(
    loaded: dict[str, LoadedModel], references: dict[str, Any], workshop: Workshop, tmp_path: Path
) -> None:
    """As apply_chat_template of transformers does it, up to where the answer begins; a prompt is the system's."""
    from transformers import AutoTokenizer

    template = (
        "{% for message in messages %}{{ '[CLS] ' + message['role'] + ' ' + message['content'] + ' [SEP] ' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'the cat' }}{% endif %}"
    )
    model = with_settings(loaded["llama"], tmp_path, {**TOKENS, "max_new_tokens": 5})
    (tmp_path / "chat_template.jinja").write_text(template)
    answer = Writer(model, GenerateOptions(chat=True)).write(["a dog"], prompt="on the mat").answers[0]
    tokenizer = AutoTokenizer.from_pretrained(generators.checkpoint(workshop, "llama"))
    messages = [{"role": "system", "content": "on the mat"}, {"role": "user", "content": "a dog"}]
    chat = tokenizer.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False)
    ids = tuple(tokenizer(chat, add_special_tokens=False)["input_ids"])
    assert answer.num_tokens == len(ids) == 13
    assert answer.token_ids == expected(references["llama"], ids, {**TOKENS, "max_new_tokens": 5})
    with pytest.raises(InputError, match="has no chat template"):
        Writer(with_settings(loaded["llama"], tmp_path / "none", TOKENS), GenerateOptions(chat=True))


def test_a_file_of_another_tool_is_given_positions(
    loaded: dict[str, LoadedModel], workshop: Workshop, tmp_path: Path
) -> None:
    """Counted from the mask, those of the last token behind a cache; here the graph adds what they should not be."""
    model = onnx.load(generators.exported(workshop, "llama"))
    graph = model.graph
    positions = onnx.helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, ["batch_size", "sequence"])
    graph.input.insert(2, positions)
    # position - (number of real tokens up to it - 1), which is 0 where both are right, moves the ids of tokens.
    graph.node.insert(0, onnx.helper.make_node("CumSum", ["attention_mask", "one"], ["counted"]))
    graph.node.insert(1, onnx.helper.make_node("Shape", ["input_ids"], ["given"], start=1))
    graph.node.insert(2, onnx.helper.make_node("Neg", ["given"], ["start"]))
    graph.node.insert(3, onnx.helper.make_node("Slice", ["counted", "start", "end", "axes"], ["last"]))
    graph.node.insert(4, onnx.helper.make_node("Sub", ["last", "one"], ["places"]))
    graph.node.insert(5, onnx.helper.make_node("Max", ["places", "zero"], ["wanted"]))
    graph.node.insert(6, onnx.helper.make_node("Sub", ["position_ids", "wanted"], ["off"]))
    graph.node.insert(7, onnx.helper.make_node("Add", ["input_ids", "off"], ["moved"]))
    for name, value in {"one": 1, "zero": 0}.items():
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    for name, value in {"end": 2**31, "axes": 1}.items():
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
    gather = next(node for node in graph.node if node.op_type == "Gather" and "input_ids" in node.input)
    gather.input[list(gather.input).index("input_ids")] = "moved"
    onnx.save(model, tmp_path / "llama.onnx")
    folder = str(generators.checkpoint(workshop, "llama"))
    options = GenerateOptions(max_new_tokens=8)
    found = generate(tmp_path / "llama.onnx", TEXTS[:3], options=options, model_name=folder)
    assert found.answers == Writer(loaded["llama"], options).write(TEXTS[:3]).answers


def test_an_answer_ends_where_the_model_takes_no_more(loaded: dict[str, LoadedModel]) -> None:
    """Llama's positions are 64; a prompt that leaves no room is refused, and so is one past max_length."""
    report = Writer(loaded["llama"], GenerateOptions(max_new_tokens=500)).write(["cat " * 50])
    assert report.answers[0].finish_reason == "limit"
    assert report.answers[0].num_tokens + len(report.answers[0].token_ids) == 64
    assert "1 of 1 answers end where the model takes no more: 64 tokens" in report.notes
    with pytest.raises(InputError, match="has 64 tokens, and text and answer may have 64 together"):
        Writer(loaded["llama"], GenerateOptions(max_new_tokens=5)).write(["cat " * 90])


HOSTILE: list[tuple[Any, str]] = [
    ({"num_beams": 4}, "asks for num_beams 4, which is not computed here"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "asks for penalty_alpha 0.6"),
    ({"num_return_sequences": 3}, "asks for num_return_sequences 3"),
    ({"guidance_scale": 1.5}, "asks for guidance_scale 1.5"),
    ({"watermarking_config": {"bias": 2.5}}, "asks for watermarking_config"),
    ({"prompt_lookup_num_tokens": 3}, "asks for prompt_lookup_num_tokens 3"),
    ({"force_words_ids": [[5]]}, "asks for force_words_ids"),
    ({"temperature": "hot"}, "temperature is 'hot', and not a number from 0"),
    ({"temperature": -1.0}, "temperature is -1.0, and not a number"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": 10**400}, "temperature is 1000"),
    ({"top_k": 2.5}, "top_k is 2.5, and not a whole number"),
    ({"top_p": 3}, "top_p is 3, and not a number from 0 to 1"),
    ({"do_sample": "yes"}, "do_sample is 'yes', and not true or false"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0, and not a number above 0"),
    ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size is -2"),
    ({"max_length": 0}, "max_length is 0"),
    ({"max_new_tokens": 10**12}, "max_new_tokens is 1000000000000"),
    ({"eos_token_id": "end"}, "eos_token_id is 'end', and not the id of a token"),
    ({"eos_token_id": [3, 999]}, "eos_token_id has token 999, and the model gives scores for 100 tokens"),
    ({"forced_eos_token_id": 100}, "forced_eos_token_id has token 100"),
    ({"suppress_tokens": [-1]}, r"suppress_tokens is \[-1\]"),
    ({"bad_words_ids": [[1], 2]}, "bad_words_ids is"),
    ({"bad_words_ids": [[177]]}, "bad_words_ids has token 177"),
    ({"sequence_bias": {"5": 1}}, "sequence_bias is"),
    ({"exponential_decay_length_penalty": [1]}, r"exponential_decay_length_penalty is \[1\]"),
    ({"stop_strings": [""]}, r"stop_strings is \[''\]"),
    ([1, 2], "not a JSON object"),
    ({"max_length": 3}, "text and answer may have 3 together"),
]


@pytest.mark.parametrize(("settings", "message"), HOSTILE)
def test_settings_of_nonsense_end_in_one_clear_error(
    settings: Any, message: str, loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    """Each names the setting and its value."""
    model = with_settings(loaded["llama"], tmp_path, settings)
    with pytest.raises(InputError, match=message):
        Writer(model).write(TEXTS)


def test_a_decoding_that_is_asked_for_stands_above_a_search_that_is_not_computed(
    loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    """The way out that the error names."""
    model = with_settings(loaded["t5"], tmp_path, {"num_beams": 4, "early_stopping": True, **TOKENS})
    plain = with_settings(loaded["t5"], tmp_path / "plain", TOKENS)
    found = Writer(model, GenerateOptions(decoding="greedy")).write(TEXTS)
    assert found.answers == Writer(plain).write(TEXTS).answers
    assert max(len(answer.token_ids) for answer in found.answers) == 20  # transformers' default


@pytest.fixture
def files(workshop: Workshop, tmp_path: Path) -> Path:
    """A decoder with its encoder, to be damaged."""
    shutil.copytree(generators.exported(workshop, "t5").parent, tmp_path / "t5")
    return tmp_path / "t5" / "t5.onnx"


def set_metadata(path: Path, key: str, value: str) -> None:
    model = onnx.load(path)
    entry = next(entry for entry in model.metadata_props if entry.key == key)
    entry.value = value
    onnx.save(model, path)


def fail(path: Path, error: type[OnnxtoolError], message: str) -> None:
    with pytest.raises(error, match=message):
        generate(path, ["a cat"], options=GenerateOptions(max_new_tokens=2))


def test_a_decoder_without_its_encoder_says_which_file_is_missing(files: Path) -> None:
    """By the name in its metadata; a name that leaves the folder is not followed."""
    encoder = files.with_name("t5-encoder.onnx")
    content = encoder.read_bytes()
    encoder.unlink()
    fail(files, InputError, r"the encoder of .*t5\.onnx is not there: .*t5-encoder\.onnx")
    encoder.write_bytes(content[:1000])
    fail(files, ModelFileError, r"t5-encoder\.onnx")
    encoder.write_bytes(content)
    fail(encoder, InputError, "is the encoder of 't5.onnx', and writes nothing by itself")
    set_metadata(files, "onnxtool.encoder", "../t5-encoder.onnx")
    fail(files, ModelFileError, "is not the name of a file beside it")


def test_files_that_do_not_belong_together_are_refused(files: Path, workshop: Workshop) -> None:
    """An encoder of other weights, sizes or of nothing, and a cache that comes out otherwise than it goes in."""
    set_metadata(files, "onnxtool.weights_sha256", "0" * 64)
    fail(files, InputError, "is not the encoder of .*: they come from different weights")
    other = onnx.load(files.with_name("t5-encoder.onnx"))
    other.graph.output[0].type.tensor_type.shape.dim[3].dim_value = 16
    onnx.save(other, files.with_name("t5-encoder.onnx"))
    fail(files, InputError, r"is not the encoder of .*: the decoder takes past_key_values.0.encoder.key float32")
    shutil.copyfile(generators.exported(workshop, "llama"), files.with_name("t5-encoder.onnx"))
    fail(files, InputError, "this file gives nothing of that name")
    path = files.with_name("llama.onnx")
    shutil.copytree(files.with_name("t5"), files.with_name("llama"))
    llama = onnx.load(generators.exported(workshop, "llama"))
    llama.graph.output[1].type.tensor_type.shape.dim[1].dim_value = 3
    onnx.save(llama, path)
    fail(path, InputError, "does not go from step to step: it takes past_key_values.0.key")
    del llama.graph.output[1]
    onnx.save(llama, path)
    fail(path, InputError, "and gives no present.0.key")


def test_optimized_files_write_the_same(workshop: Workshop, loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    """Cross attention over other keys than queries is fused, and the encoder is taken from where it lies."""
    from onnxtool.optimize import OptimizeOptions, optimize_model

    source = generators.exported(workshop, "bart")
    shutil.copytree(source.with_suffix(""), tmp_path / "bart")
    for name in ("bart", "bart-encoder"):
        report = optimize_model(OptimizeOptions(source.with_name(f"{name}.onnx"), output=tmp_path / f"{name}-o.onnx"))
        assert [(fusion.expected, fusion.found) for fusion in report.fusions if fusion.kind == "attention"] == [
            (4, 4) if name == "bart" else (2, 2)
        ]
    options = GenerateOptions(max_new_tokens=8, encoder_path=tmp_path / "bart-encoder-o.onnx")
    found = generate(tmp_path / "bart-o.onnx", TEXTS[:3], options=options, model_name=str(tmp_path / "bart")).answers
    assert found == Writer(loaded["bart"], GenerateOptions(max_new_tokens=8)).write(TEXTS[:3]).answers
