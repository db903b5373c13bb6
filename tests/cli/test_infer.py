"""`onnxtool infer` from its entry point: exit codes, stdout, stderr and files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from onnxtool.runtime.providers import cuda_problem
from tests.cli.entry_point import json_of, run_infer, run_process
from tests.infer.tiny_models import VOCABULARY, TinyModel, table, tokenizer_stamp, write_checkpoint

V = len(VOCABULARY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a sparse encoder and an embedder, and their tokenizers."""
    models = tmp_path / "models"
    stamp = tokenizer_stamp(write_checkpoint(models / "splade", config={"max_position_embeddings": 32}))
    sparse = {"onnxtool.task": "sparse-encoding", "onnxtool.head": "logits", "onnxtool.files": "splade", **stamp}
    TinyModel(table(V, V), "logits", positions=32, metadata=sparse).write(models / "splade.onnx")
    pooled = {"Transformer": {}, "Pooling": {"pooling_mode": "mean"}}
    stamp = tokenizer_stamp(write_checkpoint(models / "dense", modules=pooled))
    dense = {"onnxtool.task": "sentence-similarity", "onnxtool.head": "none", "onnxtool.files": "dense", **stamp}
    TinyModel(table(V, 4), "last_hidden_state", metadata=dense).write(models / "dense.onnx")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "options", "code", "reason"),
    [
        ("dense", ["--top_k", "2"], 1, "--top_k 2 was passed: models/dense.onnx gives similarities, no candidates"),
        ("splade", ["--vectors"], 2, "models/splade.onnx gives terms and no vectors; leave out --vectors"),
    ],
)
def test_an_option_that_the_model_has_no_use_for_is_refused(
    folder: Path, model: str, options: list[str], code: int, reason: str
) -> None:
    done = run_infer(folder, "--model_path", f"models/{model}.onnx", "--text", "the cat", *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert reason in done.stderr


def test_texts_are_answered_on_stdout_and_progress_is_on_stderr(folder: Path) -> None:
    """A heading and a table of terms for each text, in plain columns where stdout is no terminal."""
    texts = ("--text", "the red cat", "--text", "a dog")
    process = run_infer(folder, "--model_path", "models/splade.onnx", *texts, "--top_k", "2", "--provider", "cpu")
    assert process.returncode == 0
    lines = process.stdout.splitlines()
    assert lines[:3] == ["Model: models/splade.onnx", "Task: sparse-encoding", "Provider: cpu"]
    first = lines.index("1. the red cat (5 tokens):")
    assert lines[first + 1].split() == ["term", "weight"]
    assert [len(line.split()) for line in lines[first + 2 : first + 5]] == [2, 2, 0]
    assert "2. a dog (4 tokens):" in lines
    assert process.stderr.splitlines() == ["loading models/splade.onnx …", "running text 1 of 2 …"]


def test_json_is_one_document_with_the_ids_of_the_corpus(folder: Path) -> None:
    """Texts of the command line come first; hyphens in options are as good as underscores."""
    (folder / "corpus.jsonl").write_text('{"id": "d1", "contents": "the cat"}\n{"id": "d2", "contents": "a mat"}\n')
    options = ("--text", "red house", "--input", "corpus.jsonl", "--top-k", "3", "--format", "json", "--quiet")
    process = run_infer(folder, "--model-path", "models/splade.onnx", *options)
    report = json_of(process)
    assert process.stderr == ""
    keys = {"model", "provider", "task", "kind", "answers", "similarities", "rankings", "notes"}
    assert set(report) == keys
    assert report["kind"] == "terms"
    assert [answer["id"] for answer in report["answers"]] == [None, "d1", "d2"]
    assert [len(answer["candidates"]) for answer in report["answers"]] == [3, 3, 3]
    assert set(report["answers"][0]["candidates"][0]) == {"label", "score"}


def test_any_number_of_texts_is_answered_in_lines(folder: Path) -> None:
    """A line is an answer of the JSON report, in the order of the texts; facts and notes of all are on stderr."""
    texts = [{"id": f"d{number}", "contents": "cat " * (1 + number % 50)} for number in range(300)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    options = ("--model_path", "models/splade.onnx", "--input", "corpus.jsonl")
    report = json_of(run_infer(folder, *options, "--format", "json"))
    process = run_infer(folder, *options, "--format", "jsonl")
    assert [json.loads(line) for line in process.stdout.splitlines()] == report["answers"]
    assert f"note: {report['notes'][0]}" in process.stderr.splitlines()
    assert process.stderr.splitlines()[-1] == "300 texts answered by models/splade.onnx (sparse-encoding, cpu)"
    packed = run_infer(folder, *options, "--output", "answers.jsonl.gz")
    assert (packed.returncode, packed.stdout) == (0, "")
    assert gzip.decompress((folder / "answers.jsonl.gz").read_bytes()).decode() == process.stdout


def test_more_texts_than_a_report_holds_are_answered_in_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no format is asked for; a line that is wrong leaves no file."""
    monkeypatch.setattr("onnxtool.cli.infer.MAX_IN_ONE_REPORT", 2)
    (folder / "texts.txt").write_text("a\nb\nc\n")
    options = ("--model_path", "models/dense.onnx", "--input", "texts.txt")
    assert [json.loads(line)["text"] for line in run_infer(folder, *options).stdout.splitlines()] == ["a", "b", "c"]
    assert run_infer(folder, *options, "--format", "text").stdout.startswith("Model: ")
    (folder / "wrong.jsonl").write_text('{"id": 1, "contents": "a"}\n' * 300 + "x\n")
    process = run_infer(folder, *options[:2], "--input", "wrong.jsonl", "--output", "o.jsonl")
    assert process.returncode == 1
    assert "wrong.jsonl:301 is not JSON" in process.stderr
    assert [path.name for path in folder.iterdir() if "o.jsonl" in path.name] == []


def test_embeddings_are_shown_as_a_table_of_similarities(folder: Path) -> None:
    """Rows and columns are numbered, and the texts are listed."""
    process = run_infer(
        folder, "--model_path", "models/dense.onnx", "--text", "red cat", "--text", "red cat", "--quiet"
    )
    assert process.returncode == 0
    lines = process.stdout.splitlines()
    assert lines[lines.index("Texts:") + 2].split() == ["1", "4", "red", "cat"]
    start = lines.index("Cosine similarity:")
    assert [line.split() for line in lines[start + 1 :]] == [
        ["#", "1", "2"],
        ["1", "1.0000", "1.0000"],
        ["2", "1.0000", "1.0000"],
    ]


def test_many_embeddings_are_shown_with_the_nearest_of_each(folder: Path) -> None:
    """A table of all pairs would be wider than any terminal; JSON has it."""
    words = [f"{first} {second}" for first in ("cat", "dog", "red", "blue") for second in ("mat", "house", "sat", "on")]
    (folder / "texts.txt").write_text("\n".join([*words, "cat mat"]))
    options = ("--model_path", "models/dense.onnx", "--input", "texts.txt", "--quiet")
    lines = run_infer(folder, *options).stdout.splitlines()
    start = lines.index("Nearest other text of each:")
    assert lines[start + 1].split() == ["#", "nearest", "cosine"]
    assert lines[start + 2].split() == ["1", "17", "1.0000"]
    assert len(json_of(run_infer(folder, *options, "--format", "json"))["similarities"]) == 17


def test_embeddings_themselves_are_printed_where_that_is_asked_for(folder: Path) -> None:
    """All numbers on a line a text; JSON has them in any case."""
    options = ("--model_path", "models/dense.onnx", "--text", "red cat", "--text", "dog", "--quiet")
    report = json_of(run_infer(folder, *options, "--format", "json"))
    lines = run_infer(folder, *options, "--vectors").stdout.splitlines()
    printed = lines[lines.index("Vectors:") + 1 :]
    assert [line.partition(": ")[0] for line in printed] == ["1", "2"]
    for line, answer in zip(printed, report["answers"], strict=True):
        assert [float(number) for number in line.partition(": ")[2].split()] == answer["vector"]
        assert len(answer["vector"]) == 4
    assert "Vectors:" not in run_infer(folder, *options).stdout


def test_texts_are_ranked_for_a_query(folder: Path) -> None:
    """Best first, a table a query; lines of a file may bring queries of their own."""
    values = np.zeros((V, 1), np.float32)
    values[VOCABULARY.index("cat")] = 2.0
    metadata = {"onnxtool.task": "text-classification", "onnxtool.files": "splade"}
    TinyModel(values, "logits", pooled=True, metadata=metadata).write(folder / "models" / "reranker.onnx")
    pairs = ('{"id": "d1", "contents": "a cat"}', '{"id": "d2", "query": "the house", "contents": "a cat cat"}')
    (folder / "pairs.jsonl").write_text("\n".join(pairs))
    options = ("--model_path", "models/reranker.onnx", "--query", "a red", "--input", "pairs.jsonl", "--quiet")
    lines = run_infer(folder, *options, "--text", "dog").stdout.splitlines()
    start = lines.index("a red:")
    assert lines[start + 1].split() == ["rank", "score", "tokens", "text"]
    assert [line.split()[:2] for line in lines[start + 2 : start + 4]] == [["1", "0.8808"], ["2", "0.5000"]]
    assert "[d1] a cat" in lines[start + 2]
    assert "the house:" in lines[start + 4 :]
    report = json_of(run_infer(folder, *options, "--text", "dog", "--format", "json"))
    assert report["rankings"] == [{"query": "a red", "order": [1, 0]}, {"query": "the house", "order": [2]}]
    assert [answer["query"] for answer in report["answers"]] == ["a red", "a red", "the house"]


def test_words_with_labels_are_a_table_with_their_places(folder: Path) -> None:
    """Characters are counted from 0, the end is not part of the span."""
    metadata = {"onnxtool.task": "token-classification", "onnxtool.files": "splade"}
    TinyModel(table(V, 1), "logits", metadata=metadata).write(folder / "models" / "tagger.onnx")
    lines = run_infer(folder, "--model_path", "models/tagger.onnx", "--text", "red cat", "--quiet").stdout.splitlines()
    start = lines.index("1. red cat (4 tokens):")
    assert [line.split() for line in lines[start + 1 :]] == [
        ["label", "score", "characters", "text"],
        ["LABEL_0", "1.0000", "0-3", "red"],
        ["LABEL_0", "1.0000", "4-7", "cat"],
    ]


def test_long_texts_are_read_as_asked(folder: Path) -> None:
    """In windows, which is said at the text and in a note, or not at all."""
    options = ("--model_path", "models/splade.onnx", "--text", "cat " * 50, "--quiet")
    windows = run_infer(folder, *options, "--long", "window", "--overlap", "0")
    assert "(54 tokens, 2 windows):" in windows.stdout
    assert "note: 1 of 1 texts were read in windows of at most 32 tokens" in windows.stdout
    refused = run_infer(folder, *options, "--long", "fail")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "error: text 1 has more than 32 tokens" in refused.stderr
    assert "--long window" in refused.stderr


def test_a_prompt_is_written_before_each_text(folder: Path) -> None:
    """By its name in the checkpoint; a name that is none fails."""
    config = {"prompts": {"query": "the red "}}
    (folder / "models" / "dense" / "config_sentence_transformers.json").write_text(json.dumps(config))
    options = ("--model_path", "models/dense.onnx", "--text", "cat", "--quiet")
    process = run_infer(folder, *options, "--prompt", "query")
    assert "note: 'the red ' stands before each text" in process.stdout
    assert "1. cat (5 tokens):" in process.stdout
    wrong = run_infer(folder, *options, "--prompt", "passage")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "no prompt called 'passage'; it has query ('the red ')" in wrong.stderr


def test_the_result_goes_to_a_file_which_is_not_overwritten(folder: Path) -> None:
    """Nothing is on stdout then; a file that is there fails before the model is loaded, and --force replaces it."""
    options = (
        "--model_path",
        "models/splade.onnx",
        "--text",
        "cat",
        "--output",
        "out/answers.md",
        "--format",
        "markdown",
    )
    process = run_infer(folder, *options)
    assert (process.returncode, process.stdout) == (0, "")
    written = (folder / "out" / "answers.md").read_text(encoding="utf-8")
    assert "| term | weight |" in written
    (folder / "out" / "answers.md").write_text("mine")
    refused = run_infer(folder, *options)
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        "error: out/answers.md exists already",
        "hint: pass --force to replace it, or another path",
    ]
    assert (folder / "out" / "answers.md").read_text() == "mine"
    assert run_infer(folder, *options, "--force").returncode == 0
    assert (folder / "out" / "answers.md").read_text(encoding="utf-8") == written


def test_a_text_that_was_cut_says_so(folder: Path) -> None:
    """At the text itself, and in a note with the limit."""
    process = run_infer(folder, "--model_path", "models/splade.onnx", "--text", "cat " * 50, "--quiet")
    assert "(32 tokens, cut):" in process.stdout
    assert "note: 1 of 1 texts were cut to 32 tokens (max_position_embeddings of config.json)" in process.stdout


def test_a_text_cannot_control_the_terminal(folder: Path) -> None:
    """Corpora are untrusted: a heading is one line, and control characters are shown as escapes."""
    process = run_infer(folder, "--model_path", "models/splade.onnx", "--text", "cat \x1b[2J\n\tdog", "--quiet")
    assert r"1. cat \x1b[2J dog (" in process.stdout
    assert "\x1b" not in process.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to run: pass --text, --image, --input or --benchmark"),
        (("--text", "cat", "--runs", "3"), "without --benchmark; pass it, or leave out --runs\n"),
        (("--text", "cat", "--duration", "3"), "without --benchmark; pass it, or leave out --duration\n"),
        (("--text", "cat", "--compare", "x.onnx"), "without --benchmark; pass it, or leave out --compare\n"),
        (("--text", "cat", "--fail_if", "p50>3"), "without --benchmark; pass it, or leave out --fail_if\n"),
        (("--text", "cat", "--warmup", "3"), "without --benchmark; pass it, or leave out --warmup\n"),
        (("--text", "cat", "--batch_size", "1,8"), "without --benchmark; pass it, or leave out --batch_size\n"),
        (
            ("--runs", "3", "--sequence_length", "4"),
            "without --benchmark; pass it, or leave out --sequence_length and --runs\n",
        ),
        (("--query", "cat"), "nothing to run: pass --text, --image, --input or --benchmark beside --query"),
        (("--benchmark", "--query", "cat"), "leave out --query\n"),
        (("--text", "cat", "--overlap", "3"), "pass --long window, or leave out --overlap"),
        (("--benchmark", "--batch_size", "1,x"), "'1,x' is not a list of positive integers"),
    ],
)
def test_usage_errors_exit_2(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    """With where to read on."""
    process = run_infer(folder, "--model_path", "models/splade.onnx", *arguments)
    assert (process.returncode, process.stdout) == (2, "")
    assert message in process.stderr
    assert process.stderr.endswith("see onnxtool infer --help\n")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--model_path", "none.onnx", "--text", "cat"), "no such model file: none.onnx", "check "),
        (
            ("--model_path", "models/splade.onnx", "--input", "none.txt"),
            "no such input file: none.txt",
            "check --input",
        ),
        (
            ("--model_path", "models/splade.onnx", "--text", "cat", "--model_name", "owner/name"),
            "'owner/name' is neither a folder here nor",
            "without a network, pass --model_name with a folder",
        ),
        (("--model_path", "models/splade.onnx", "--input", "bad.jsonl"), "bad.jsonl:2 is not JSON", "each line"),
    ],
)
def test_failures_exit_1_with_a_way_out(folder: Path, arguments: tuple[str, ...], message: str, hint: str) -> None:
    """One line of what happened and one of what to do, no traceback."""
    (folder / "bad.jsonl").write_text('{"id": 1, "contents": "x"}\nnot json\n')
    process = run_infer(folder, *arguments, "--quiet")
    assert (process.returncode, process.stdout) == (1, "")
    error, way_out = process.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert way_out.startswith("hint: ")
    assert hint in way_out


@pytest.mark.skipif(not cuda_problem(), reason="CUDA runs here")
def test_cuda_where_it_is_absent_fails_and_says_what_is_missing(folder: Path) -> None:
    """It is never replaced by the CPU in silence; auto runs there and says so."""
    options = ("--model_path", "models/splade.onnx", "--text", "cat", "--quiet")
    process = run_infer(folder, *options, "--provider", "cuda")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith(f"error: the provider cuda cannot run here: {cuda_problem()}")
    assert "Provider: cpu" in run_infer(folder, *options, "--provider", "auto").stdout


def test_help_has_the_options_of_each_job_under_its_title(folder: Path) -> None:
    """What all jobs share comes first."""
    printed = run_infer(folder, "--help").stdout
    first, *jobs = printed.split("\nOptions for ")
    assert "--force" in first
    for option, job in zip(("--num_beams", "--weights", "--runs"), jobs, strict=True):
        assert option in job


def test_texts_need_neither_torch_nor_transformers(folder: Path) -> None:
    """The tokenizers library reads tokenizer.json by itself, which an export knows to say all."""
    imported = _imported(folder, "--model_path", "models/splade.onnx", "--text", "cat")
    assert {"onnxruntime", "tokenizers"} <= imported
    assert not {"torch", "transformers", "huggingface_hub"} & imported


def _imported(folder: Path, *arguments: str) -> set[str]:
    """Return the top-level packages that a run imports, as `-X importtime` reports them."""
    process = run_process(folder, "infer", "-v", *arguments, PYTHONPROFILEIMPORTTIME="1")
    assert process.returncode == 0, process.stderr
    lines = [line for line in process.stderr.splitlines() if line.startswith("import time:")]
    assert lines
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
