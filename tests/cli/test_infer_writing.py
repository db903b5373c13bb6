"""`onnxtool infer` with models that write: what is printed, streamed and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import generators
from tests.cli.entry_point import json_of, run_infer
from tests.infer.tiny_models import TinyModel, table, write_checkpoint
from tests.workshop import Workshop


@pytest.fixture(scope="module")
def llama(workshop: Workshop) -> Path:
    return generators.exported(workshop, "llama")


@pytest.fixture(scope="module")
def t5(workshop: Workshop) -> Path:
    return generators.exported(workshop, "t5")


def test_a_decoder_writes_where_it_is_asked_to(llama: Path) -> None:
    """Without --max_new_tokens it says what may come next, as it always did."""
    texts = ("--model_path", llama.name, "--text", "the cat", "--text", "a dog sat")
    report = json_of(run_infer(llama.parent, *texts, "--format", "json"))
    assert (report["kind"], len(report["answers"][0]["candidates"])) == ("tokens", 10)
    report = json_of(run_infer(llama.parent, *texts, "--max_new_tokens", "5", "--format", "json"))
    assert list(report) == [
        *("model", "provider", "task", "kind", "decoding", "answers", "num_generated", "generation_ms"),
        *("first_token_ms", "throughput_tokens_per_s", "notes"),
    ]
    assert (report["kind"], report["decoding"], report["num_generated"]) == ("texts", "greedy", 10)
    assert list(report["answers"][0]) == [
        *("text", "num_tokens", "truncated", "generated", "token_ids", "finish_reason", "id"),
    ]
    assert [answer["finish_reason"] for answer in report["answers"]] == ["length", "length"]
    assert report["throughput_tokens_per_s"] > 0


def test_what_is_written_after_any_number_of_texts_is_a_line_each(llama: Path) -> None:
    """The lines are the answers of the report; what is drawn does not depend on where a part begins."""
    texts = ("--model_path", llama.name, *(word for text in ("the cat", "a dog", "red") for word in ("--text", text)))
    drawn = ("--max_new_tokens", "5", "--decoding", "sample", "--seed", "3", "--quiet")
    report = json_of(run_infer(llama.parent, *texts, *drawn, "--format", "json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnxtool.infer.answering._STREAMED_AT_A_TIME", 2)
        lines = run_infer(llama.parent, *texts, *drawn, "--format", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == report["answers"]


def test_an_encoder_decoder_always_writes(t5: Path) -> None:
    """With its speed, and why each answer ended."""
    process = run_infer(t5.parent, "--model_path", t5.name, "--text", "the cat", "--max-new-tokens", "4", "--quiet")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[:5] == [
        "Model: t5.onnx", "Task: text2text-generation-with-past", "Provider: cpu", "Decoding: greedy",
        "Tokens written: 4",
    ]  # fmt: skip
    assert any(line.startswith("Speed: ") and line.endswith(" tokens/s") for line in lines)
    assert lines[-2:] == ["tokens: 4, ended by length", ""] or lines[-1] == "tokens: 4, ended by length"


def test_what_is_written_is_streamed_to_stdout_and_nothing_else(t5: Path) -> None:
    """A line for each text; the speed goes to stderr."""
    texts = ("--text", "the cat", "--text", "a dog sat on the mat")
    report = json_of(run_infer(t5.parent, "--model_path", t5.name, *texts, "--format", "json"))
    process = run_infer(t5.parent, "--model_path", t5.name, *texts, "--stream")
    assert process.stdout == "".join(f"{answer['generated']}\n" for answer in report["answers"])
    assert process.stderr.startswith(f"{report['num_generated']} tokens, ")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--query", "which?"), 2, "the model writes text; leave out --query"),
        (("--stream", "--format", "json"), 2, "--stream prints text to stdout: leave out --output and --format"),
        (("--decoding", "beams"), 2, "'beams' is not one of 'greedy', 'sample'"),
        (("--temperature", "0"), 2, "0.0 is not in the range x>0."),
        (("--long", "window"), 1, "reads a text at once, in no windows"),
        (("--task", "query"), 2, "--task query does not apply"),
        (("--representation", "dense"), 2, "--representation dense does not apply"),
        (("--stop", ""), 1, "one of the texts that end an answer is empty"),
        (("--benchmark", "--max_new_tokens", "3"), 2, "leave out --max_new_tokens"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    t5: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    """Each names what to leave out."""
    process = run_infer(t5.parent, "--model_path", t5.name, "--text", "a cat", *options)
    assert process.returncode == code
    assert message in process.stderr
    assert process.stdout == ""


def test_a_model_that_writes_nothing_says_so(tmp_path: Path) -> None:
    """Such as one that was exported without its cache."""
    model = TinyModel(table(15, 15), "logits", metadata={"onnxtool.task": "text-generation"})
    model.write(tmp_path / "decoder.onnx")
    write_checkpoint(tmp_path / "decoder")
    options = ("--max_new_tokens", "3", "--query", "a dog")
    process = run_infer(tmp_path, "--model_path", "decoder.onnx", "--text", "a cat", *options)
    assert process.returncode == 1
    assert "decoder.onnx writes no text: it has no cache" in process.stderr
    assert "--task text-generation-with-past" in process.stderr
