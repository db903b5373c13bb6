"""Put a checkpoint's tokenizer into an exported graph (`export --tokenizer in_graph`)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import onnx_ir as ir

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder, Prompts, find_checkpoint_folder
from onnxtool.checkpoint.limits import Limit, text_limit
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError, SessionError
from onnxtool.export.options import PAIRS_IN_GRAPH, ExportOptions
from onnxtool.export.text_proof import TextProof
from onnxtool.export.tokenizer_rules import read_tokenizer
from onnxtool.graph.text_input import GIVEN, LOWEST_OPSET, POOLED, Frame, build_front, put_before, serialized
from onnxtool.graph.tokenizers import GraphTokenizer
from onnxtool.model_file import ModelFile, Staging, save_model
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.metadata import (
    EMBEDDED_KEY,
    LONGEST,
    NO_PADDING,
    PADDING_KEY,
    TOKENIZER_KEY,
    TextInput,
    pack,
)
from onnxtool.model_file.weights import load_model
from onnxtool.progress import tell
from onnxtool.runtime.text_graph import TextGraph, check_same_outputs
from onnxtool.runtime.tokens import open_tokenizer

_OF_PAIRS = (RANKING, "text-classification")
_WAY = "leave --tokenizer out, and tokenize where the file runs"


def put_tokenizer(core: ModelFile, staging: Staging, files: Path, options: ExportOptions) -> ModelFile:
    """Replace a staged graph by one that reads texts, verified against it and its tokenizer.

    Args:
        core: the staged graph, which reads ids.
        staging: where it lies.
        files: the folder with its tokenizer.
        options: of the export.

    Raises:
        InputError: the graph needs more than ids, or gives something for each token.
        InputError: a graph cannot express the tokenizer.
        InputError: the result differs.
    """
    with tempfile.TemporaryDirectory(dir=staging.folder.parent) as name:
        core = _moved(core, Path(name))
        metadata = core.metadata
        folder = CheckpointFolder(
            files, tokenizer_sha256=metadata.get(TOKENIZER_KEY, ""), padding=metadata.get(PADDING_KEY, "")
        )
        _require_plain(core, folder)
        is_pair = core.stated_task == RANKING or options.tokenizer == PAIRS_IN_GRAPH
        if is_pair and core.stated_task not in _OF_PAIRS:
            raise InputError(
                f"{core.stated_task} is a task of single texts, and --tokenizer {options.tokenizer} reads pairs",
                "pass --tokenizer in_graph",
            )
        before = Prompts.of(folder).find(options.prompt)
        limit = text_limit(core, folder, core.stated_task)
        most_tokens = LONGEST if limit is None else limit.tokens
        tokenizer = open_tokenizer(folder)
        rules, frame = _read(core, tokenizer, most_tokens, before, is_pair=is_pair)
        model = load_model(core.path)
        former = {str(value.name): value.dtype or ir.DataType.INT64 for value in model.graph.inputs}
        front = build_front(rules, frame, former, default_opset(model.graph.opset_imports))
        content = serialized(front)
        num_texts, differences = 0, dict[str, int]()
        if options.verify:
            tell("comparing the tokenizer in the graph")
            num_texts, differences = TextProof(tokenizer, rules, frame, TextGraph(content), core).check()
        put_before(model, front)
        written = ModelFile.open(save_model(model, staging))
        del model, front
        if options.verify:
            try:
                check_same_outputs(written, core, content)
            except SessionError as error:  # of no exporter: another one would not help
                raise InputError(error.message, error.hint) from error
        stated = TextInput(frame.names, tuple(former), before, frame.most_tokens, num_texts, differences)
        written.stamp({**stated.entry, EMBEDDED_KEY: pack(tokenizer.content)})
    return written


def check_tokenizer(file: ModelFile, stated: TextInput, core: ModelFile, front: bytes) -> None:
    """Compare the tokenizer in a file with the tokenizer.json in its metadata, as the export did.

    Args:
        file: the file.
        stated: how it reads texts.
        core: the part of it that reads ids.
        front: the graph before that.

    Raises:
        InputError: a text is read otherwise.
    """
    tokenizer = TextTokenizer(find_checkpoint_folder(file))
    rules, frame = _read(core, tokenizer, stated.most_tokens, stated.prompt, is_pair=len(stated.names) > 1)
    TextProof(tokenizer, rules, frame, TextGraph(front), core).check()


def _read(
    core: ModelFile, tokenizer: TextTokenizer, most_tokens: int, prompt: str, *, is_pair: bool
) -> tuple[GraphTokenizer, Frame]:
    leaves_out = bool(prompt) and POOLED in core.input_names
    num_prompt = tokenizer.count_prompt(prompt, Limit(most_tokens, "the graph")) if leaves_out else 0
    return read_tokenizer(tokenizer, most_tokens, is_pair=is_pair, prompt=prompt, num_prompt=num_prompt)


def _moved(core: ModelFile, folder: Path) -> ModelFile:
    """Move a staged graph and its external data to another folder."""
    for name in (core.path.name, *core.external_locations):
        shutil.move(core.path.with_name(name), folder / name)
    return ModelFile.open(folder / core.path.name)


def _require_plain(core: ModelFile, folder: CheckpointFolder) -> None:
    """Refuse a graph that needs more than a text to give an answer, or whose answer needs the tokens.

    Raises:
        InputError: it does.
    """
    task, opset = core.stated_task, default_opset(core.structure.opsets)
    reason = ""
    others = sorted(info.name for info in core.structure.inputs if info.name not in GIVEN or "int" not in info.dtype)
    of_tokens = [
        info.name for info in core.structure.outputs if not all(isinstance(one, int) for one in info.shape[1:])
    ]
    if others:
        reason = f"takes {', '.join(others)} as well"
    elif of_tokens or task == LATE_INTERACTION:
        reason = f"gives {', '.join(of_tokens) or 'a vector'} for each token, and who reads it does not see the tokens"
    elif core.metadata.get(PADDING_KEY) == NO_PADDING:
        reason = "does not mask padding, and texts of a batch are padded"
    elif any(isinstance(size, int) for info in core.structure.inputs for size in info.shape):
        reason = "has fixed sizes, and texts have any length"
    elif folder.sentence_modules.takes_messages(task) and ChatTemplate.of(folder, folder.sentence_modules, task):
        reason = "reads texts as chats, by a template"
    elif opset < LOWEST_OPSET:
        raise InputError(
            f"the operators that read texts need opset {LOWEST_OPSET}, and the graph has {opset}", "leave --opset out"
        )
    elif folder.locate(TOKENIZER_NAME) is None:
        raise InputError(f"no {TOKENIZER_NAME} to put into the graph", _WAY)
    if reason:
        raise InputError(f"no tokenizer can be put into the graph: it {reason}", _WAY)
