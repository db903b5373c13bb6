"""Make the most common mistakes with the command line, and write down what it answers.

`python scripts/mistakes.py` runs every command in one process, on a tiny checkpoint and files that lack or hold what
the mistake is about, and prints the page docs/guide/mistakes.md; `--output` writes it. `--quick` makes those alone that
need neither PyTorch nor a checkpoint, as the tests do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "COLUMNS": "100"}

_INTRODUCTION = """# Mistakes

What the commands answer to the mistakes that are made most often, as `python scripts/mistakes.py` found them. An error
says what happened, with the value, and a hint says the way out; the exit code is 2 where the command line is wrong, and
1 where something that it names is. `encoder` is a folder with a checkpoint of a masked language model, `model.onnx` its
export for sparse retrieval.
"""


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        section: what was to be done.
        what: the mistake, in words.
        command: what was typed after `onnxtool`.
        prepare: makes the files that it is about, in the working folder.
        is_quick: needs no checkpoint.
    """

    section: str
    what: str
    command: str
    prepare: Callable[[], None] = lambda: None
    is_quick: bool = True


def _damaged_copy(name: str, damage: Callable[[Path], None]) -> Callable[[], None]:
    def prepare() -> None:
        shutil.copytree("encoder", name)
        damage(Path(name))

    return prepare


def _write(name: str, content: str | bytes) -> Callable[[], None]:
    def prepare() -> None:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def _change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | values), "utf-8")


def _pickle(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def _pickle_of_more(folder: Path) -> None:
    import torch

    (folder / "model.safetensors").unlink()
    torch.save({"arguments": argparse.Namespace(lr=0.1)}, folder / "pytorch_model.bin")


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _without_data() -> None:
    import onnx

    Path("moved").mkdir()
    onnx.save(
        onnx.load("model.onnx"),
        "moved/model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    Path("moved/weights.bin").unlink()


def _truncated_model() -> None:
    data = Path("model.onnx").read_bytes()
    Path("half.onnx").write_bytes(data[: len(data) // 2])


def _copy_of_model(name: str) -> Callable[[], None]:
    def prepare() -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("model.onnx", name)

    return prepare


def _exchanged_inputs() -> None:
    import onnx

    model = onnx.load("model.onnx")
    names = {"attention_mask": "token_type_ids", "token_type_ids": "attention_mask"}
    for value in model.graph.input:
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    onnx.save(model, "exchanged.onnx")


MISTAKES = (
    Mistake("Any command", "a misspelled command", "expotr --model_name encoder"),
    Mistake("Any command", "a misspelled option", "export --model_nam encoder"),
    Mistake("Any command", "an option of another command", "infer --model_path model.onnx --stats"),
    Mistake("Any command", "a misspelled choice", "optimize --model_path model.onnx --precision int-8"),
    Mistake("Any command", "an option without its value", "stats --format"),
    Mistake(
        "Any command", "a number that is out of bounds", "infer --model_path model.onnx --benchmark --batch_size 0"
    ),
    Mistake(
        "Any command",
        "an unknown key in a configuration file",
        "stats model.onnx",
        _write(".onnxtool.toml", '[stats]\nfail_iff = ["nodes>+10%"]\n'),
    ),
    Mistake("Export", "no checkpoint", "export"),
    Mistake("Export", "a folder that is not there", "export --model_name ./encodr"),
    Mistake("Export", "a name that is in no cache, without a connection", "export --model_name naver/splade-v9"),
    Mistake("Export", "an ONNX file", "export --model_name model.onnx", is_quick=False),
    Mistake("Export", "a folder without a checkpoint", "export --model_name empty", lambda: Path("empty").mkdir()),
    Mistake(
        "Export",
        "a checkpoint whose weights were not downloaded",
        "export --model_name encoder-bare",
        _damaged_copy("encoder-bare", lambda folder: (folder / "model.safetensors").unlink()),
        is_quick=False,
    ),
    Mistake(
        "Export",
        "weights in a pickle",
        "export --model_name encoder-pickle",
        _damaged_copy("encoder-pickle", _pickle),
        is_quick=False,
    ),
    Mistake(
        "Export",
        "a pickle that holds more than tensors",
        "export --model_name encoder-objects --allow_pickle",
        _damaged_copy("encoder-objects", _pickle_of_more),
        is_quick=False,
    ),
    Mistake(
        "Export",
        "weights that were downloaded by half",
        "export --model_name encoder-half",
        _damaged_copy("encoder-half", lambda folder: _truncate(folder / "model.safetensors")),
        is_quick=False,
    ),
    Mistake(
        "Export",
        "an architecture that transformers does not know",
        "export --model_name encoder-new",
        _damaged_copy("encoder-new", lambda folder: _change_config(folder, model_type="bert9")),
        is_quick=False,
    ),
    Mistake(
        "Export",
        "a checkpoint with code of its own",
        "export --model_name encoder-code",
        _damaged_copy(
            "encoder-code",
            lambda folder: _change_config(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        ),
        is_quick=False,
    ),
    Mistake("Export", "a misspelled task", "export --model_name encoder --task fillmask"),
    Mistake(
        "Export",
        "a task that the checkpoint was not trained for",
        "export --model_name encoder --task text-classification --output classifier.onnx",
        is_quick=False,
    ),
    Mistake("Export", "an output that is there", "export --model_name encoder --output model.onnx", is_quick=False),
    Mistake(
        "Export",
        "an output in a folder that cannot be made",
        "export --model_name encoder --output model.onnx/new/model.onnx",
        is_quick=False,
    ),
    Mistake("Optimize", "a checkpoint in place of an export", "optimize --model_name encoder"),
    Mistake("Optimize", "a file that is not there", "optimize --model_path modle.onnx"),
    Mistake(
        "Optimize",
        "the folder in place of the file",
        "optimize --model_path encoder",
        lambda: Path("encoder").mkdir(exist_ok=True),
    ),
    Mistake(
        "Optimize",
        "the weights in place of the export",
        "optimize --model_path encoder/model.safetensors",
        is_quick=False,
    ),
    Mistake(
        "Optimize",
        "a file that git has only a pointer to",
        "optimize --model_path pointer.onnx",
        _write(
            "pointer.onnx",
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 438000000\n",
        ),
    ),
    Mistake(
        "Optimize",
        "a file that was copied by half",
        "optimize --model_path half.onnx",
        _truncated_model,
        is_quick=False,
    ),
    Mistake(
        "Optimize", "a file without its data", "optimize --model_path moved/model.onnx", _without_data, is_quick=False
    ),
    Mistake(
        "Optimize",
        "the input as the output",
        "optimize --model_path model.onnx --output model.onnx --force",
        is_quick=False,
    ),
    Mistake(
        "Optimize",
        "an option of another precision",
        "optimize --model_path model.onnx --output fp16.onnx --precision fp16 --activations static",
        is_quick=False,
    ),
    Mistake(
        "Optimize",
        "an error that no layer keeps",
        "optimize --model_path model.onnx --output int8.onnx --precision int8 --max_error 1e-12",
        is_quick=False,
    ),
    Mistake("Infer", "nothing to run", "infer --model_path model.onnx"),
    Mistake(
        "Infer",
        "a model without its tokenizer",
        'infer --model_path alone/model.onnx --text "to be"',
        _copy_of_model("alone/model.onnx"),
        is_quick=False,
    ),
    Mistake(
        "Infer",
        "an export whose inputs have each other's names",
        'infer --model_path exchanged.onnx --model_name encoder --text "to be"',
        _exchanged_inputs,
        is_quick=False,
    ),
    Mistake("Infer", "a picture for a model of text", "infer --model_path model.onnx --image cat.png", is_quick=False),
    Mistake("Infer", "texts that are not there", "infer --model_path model.onnx --input texts.txt", is_quick=False),
    Mistake(
        "Infer",
        "a field that no line has",
        "infer --model_path model.onnx --input titles.jsonl",
        _write("titles.jsonl", '{"id": "1", "title": "to be"}\n'),
        is_quick=False,
    ),
    Mistake(
        "Infer",
        "a collection of which no line can be used",
        "infer --model_path model.onnx --input broken.jsonl --output vectors/",
        _write("broken.jsonl", '{"id": "1", "text": 5}\nnothing\n'),
        is_quick=False,
    ),
    Mistake(
        "Infer",
        "a provider that is not installed",
        "infer --model_path model.onnx --benchmark --provider cuda",
        is_quick=False,
    ),
    Mistake(
        "Infer",
        "a text longer than the model reads, in a benchmark",
        "infer --model_path model.onnx --benchmark --sequence_length 4096",
        is_quick=False,
    ),
    Mistake(
        "Stats", "a gate on what is not measured", "stats model.onnx model.onnx --fail_if 'nodse>+10%'", is_quick=False
    ),
    Mistake("Stats", "the model behind an option", "stats --model_path model.onnx"),
    Mistake("Stats", "three files", "stats a.onnx b.onnx c.onnx"),
    Mistake("Artifacts", "a misspelled loss", "artifacts --model_path model.onnx --loss CrossEntropy"),
    Mistake(
        "Artifacts",
        "parameters that are not there",
        "artifacts --model_path model.onnx --train 'clasifier.*' --output training",
        is_quick=False,
    ),
)


@contextlib.contextmanager
def _working_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="onnxtool-mistakes-") as name:
        os.chdir(name)
        try:
            yield
        finally:
            os.chdir(before)


def _make_model() -> None:
    from zoo.checkpoint import make_checkpoint
    from zoo.tasks import find_task

    from onnxtool import ExportOptions, export_model

    make_checkpoint(find_task("fill-mask"), "bert", Path("encoder"))
    export_model(ExportOptions(model_name="encoder", task="sparse-encoding", output=Path("model.onnx")))


def answer(mistake: Mistake) -> tuple[int, str]:
    """Make a mistake in the working folder; return the exit code, and the error with its hint."""
    from onnxtool.cli import run_arguments

    mistake.prepare()
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = run_arguments(shlex.split(mistake.command))
    Path(".onnxtool.toml").unlink(missing_ok=True)
    said = errors.getvalue()
    place = said.find("error:")
    return code, (said[place:] if place >= 0 else said).strip()


def render(*, quick: bool = False) -> str:
    """Make the mistakes, or the quick ones of them, and return the page."""
    lines = [_INTRODUCTION]
    section = ""
    with _working_folder():
        if not quick:
            _make_model()
        for mistake in MISTAKES:
            if quick and not mistake.is_quick:
                continue
            if mistake.section != section:
                section = mistake.section
                lines.append(f"## {section}\n")
            code, said = answer(mistake)
            lines.append(f"**{mistake.what[0].upper()}{mistake.what[1:]}** (exit code {code})\n")
            lines.append(f"```text\n$ onnxtool {mistake.command}\n{said}\n```\n")
    return "\n".join(lines)


def main() -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="those that need no checkpoint")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    page = render(quick=arguments.quick)
    if arguments.output is None:
        sys.stdout.write(page)
    else:
        arguments.output.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
