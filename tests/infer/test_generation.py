"""Models that write: greedily as `generate` of transformers, by every setting of a checkpoint that is followed."""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
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


@pytest.fixture(scope="module")
def plain(
    loaded: dict[str, LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[tuple[int, ...]]]:
    """What each model writes without any setting."""
    settings = {"max_new_tokens": 8, **TOKENS}

    @functools.cache
    def write(name: str) -> list[tuple[int, ...]]:
        model = with_settings(loaded[name], tmp_path_factory.mktemp(name), settings)
        return [answer.token_ids for answer in Writer(model).write(TEXTS[:2]).answers]

    return write


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
    name: str, key: str, loaded: dict[str, LoadedModel], references: dict[str, Any],
    plain: Callable[[str], list[tuple[int, ...]]], tmp_path: Path,
) -> None:  # fmt: skip
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
        assert found != plain(name)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_beams_find_what_the_beams_of_generate_find(
    name: str, loaded: dict[str, LoadedModel], references: dict[str, Any], tmp_path: Path
) -> None:
    """Texts of several lengths at once, with a setting that reads what is written, by the file and by an option."""
    settings = {**TOKENS, "max_new_tokens": 8, "num_beams": 3, "no_repeat_ngram_size": 2, "length_penalty": 0.3}
    report = Writer(with_settings(loaded[name], tmp_path, settings)).write(TEXTS[:3])
    read = loaded[name].tokenize(TEXTS[:3])
    assert [answer.token_ids for answer in report.answers] == [
        expected(references[name], text.ids, settings) for text in read
    ]
    assert report.decoding == "beam_search"
    model = with_settings(loaded[name], tmp_path, {**settings, "num_beams": 1})
    assert Writer(model, GenerateOptions(num_beams=3)).write(TEXTS[:3]).answers == report.answers
    assert Writer(model).write(TEXTS[:3]).answers != report.answers
    with pytest.raises(InputError, match="3 beams are searched, and which of them is the answer shows at the end"):
        Writer(model, GenerateOptions(num_beams=3)).write(TEXTS[:3], on_text=lambda _number, _text: None)


def test_tokens_are_drawn_as_often_as_they_are_likely(loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    """By temperature and top_k of the file: the share of each first token over many texts that are the same."""
    settings = {**TOKENS, "max_new_tokens": 1, "do_sample": True, "temperature": 2.0, "top_k": 4}
    model = loaded["llama"]
    windows = model.tokenize(["a cat"])
    candidates = model.answer(["a cat"], top_k=4).answers[0].candidates
    chances = np.sqrt([candidate.score for candidate in candidates])  # temperature 2
    drawn = Writer(with_settings(model, tmp_path, settings)).write(["a cat"] * 2000).answers
    counts = Counter(model.tokenizer.word(answer.token_ids[0]) for answer in drawn)
    assert len(windows[0]) == 4
    found = [counts.pop(candidate.label) / 2000 for candidate in candidates]
    assert not counts
    np.testing.assert_allclose(found, chances / chances.sum(), atol=0.04)  # 3.5 standard deviations of 2000 draws


def test_drawn_beams_depend_on_the_seed(loaded: dict[str, LoadedModel], tmp_path: Path) -> None:
    """They share a generator, and a text is searched by itself."""
    model = with_settings(loaded["llama"], tmp_path, {**TOKENS, "max_new_tokens": 8, "num_beams": 3, "do_sample": True})
    report, again, other = (Writer(model, GenerateOptions(seed=seed)).write(TEXTS[:3]) for seed in (5, 5, 6))
    assert (report.decoding, report.answers) == ("beam_sample", again.answers)
    assert report.answers != other.answers


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
    report = Writer(model, GenerateOptions(chat=True)).write(["a dog"], prompt="on the mat")
    assert report.notes == ("'on the mat' is the system message of each text",)
    answer = report.answers[0]
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
    with pytest.raises(InputError, match="has more than 64 tokens, and text and answer may have 64 together"):
        Writer(loaded["llama"], GenerateOptions(max_new_tokens=5)).write(["cat " * 90])


HOSTILE: list[tuple[Any, str]] = [
    ({"penalty_alpha": 0.6, "top_k": 4}, "asks for contrastive_search, which is not computed here"),
    ({"prompt_lookup_num_tokens": 3}, "asks for assisted_generation"),
    ({"force_words_ids": [[5]]}, "asks for constrained_beam_search"),
    ({"num_beams": 3, "num_return_sequences": 3}, "asks for num_return_sequences 3, which is not computed here"),
    ({"guidance_scale": 1.5}, "asks for guidance_scale 1.5"),
    ({"num_return_sequences": 3}, "transformers cannot write as generation_config.json .* says: Greedy methods"),
    ({"do_sample": True, "temperature": "hot"}, r"says: `temperature` \(=hot\)"),
    ({"do_sample": True, "temperature": -1.0}, r"says: `temperature` \(=-1.0\)"),
    ({"repetition_penalty": 0}, "says: `penalty` has to be a strictly positive float, but is 0"),
    ({"max_new_tokens": "many"}, "says: "),
    ({"num_beams": {"height": 4}}, "says num_beams {'height': 4}, which"),
    ({"top_k": "all"}, "says: '>' not supported"),
    ({"min_new_tokens": 2**31}, r"says min_new_tokens 2147483648, which is not a number from 0 to 2,147,483,647"),
    ({"min_new_tokens": 30, "max_new_tokens": 3}, "says: Unfeasible length constraints"),
    ({"pad_token_id": 10**30}, "says: "),
    ({"pad_token_id": 1e308}, "says: Cannot cast"),
    ({"encoder_no_repeat_ngram_size": 10**8}, "says encoder_no_repeat_ngram_size 100000000, which"),
    ({"eos_token_id": "end"}, "says: invalid literal for int.* 'end'"),
    ({"bad_words_ids": [[1], 2]}, r"says: .*\[\[1\], 2\]"),
    ({"stop_strings": 7}, "says: 'int' object is not iterable"),
    ([1, 2], "not a JSON object"),
    ({"max_length": 3}, "text and answer may have 3 together"),
]


@pytest.mark.parametrize(("settings", "message"), HOSTILE)
def test_settings_of_nonsense_end_in_one_clear_error(
    settings: Any, message: str, loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    """Each names the file, and what transformers says of it."""
    model = with_settings(loaded["llama"], tmp_path, settings)
    with pytest.raises(InputError, match=message):
        Writer(model).write(TEXTS)


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 3}, {"seed": 1, "num_beams": 2}])
def test_options_of_samples_are_refused_where_none_are_drawn(
    options: dict[str, Any], loaded: dict[str, LoadedModel]
) -> None:
    (name, *_), asked = options, GenerateOptions(**options)
    with pytest.raises(InputError, match=rf"--{name} was passed, and \w+ decoding draws no samples"):
        Writer(loaded["llama"], asked)
    if "num_beams" not in options:
        assert Writer(loaded["llama"], replace(asked, decoding="sample")).decoding == "sample"


def test_a_decoding_that_is_asked_for_stands_above_beams_of_the_file(
    loaded: dict[str, LoadedModel], tmp_path: Path
) -> None:
    """As if the file did not name them; settings of beams alone do nothing then."""
    model = with_settings(loaded["t5"], tmp_path, {"num_beams": 4, "early_stopping": True, **TOKENS})
    plain = with_settings(loaded["t5"], tmp_path / "plain", TOKENS)
    found = Writer(model, GenerateOptions(decoding="greedy")).write(TEXTS)
    assert found.answers == Writer(plain).write(TEXTS).answers
    assert found.decoding == "greedy"
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
    fail(files, InputError, "is not the encoder of .*: they were written by two runs")
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
    """Cross attention over other keys than queries is fused; the encoder is the file of its name in their folder."""
    from onnxtool import OptimizeOptions, optimize_model

    source = generators.exported(workshop, "bart")
    shutil.copytree(source.with_suffix(""), tmp_path / "bart")
    for name in ("bart", "bart-encoder"):
        report = optimize_model(OptimizeOptions(source.with_name(f"{name}.onnx"), output=tmp_path / f"{name}.onnx"))
        assert [(fusion.expected, fusion.found) for fusion in report.fusions if fusion.kind == "attention"] == [
            (4, 4) if name == "bart" else (2, 2)
        ]
    found = generate(tmp_path / "bart.onnx", TEXTS[:3], options=GenerateOptions(max_new_tokens=8)).answers
    assert found == Writer(loaded["bart"], GenerateOptions(max_new_tokens=8)).write(TEXTS[:3]).answers
