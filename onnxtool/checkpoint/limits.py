"""How many tokens a model takes, and which file says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.graph.operators import named_inputs
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import MAX_LENGTH_KEY, VERIFIED_LENGTH_KEY
from onnxtool.model_file.wire import read_nodes
from onnxtool.reports import Json

# Model types whose positions start behind the padding token's id, so that their table has that many rows and one
# more than the text may have tokens (transformers' create_position_ids_from_input_ids).
_PADDED_POSITIONS = frozenset(
    (
        *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm"),
        *("mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)
# What a checkpoint of sentence-transformers is for. Its limit is how it is used for these, not what its model takes.
_SENTENCE_TASKS = (
    *("sentence-similarity", "sparse-encoding", "feature-extraction", "text-classification"),
    *(RANKING, LATE_INTERACTION),
)
_DEFAULT_PAD_ID = 1  # what the configurations of all these types default to
# Tokenizers without a limit say 1e30 (transformers' VERY_LARGE_INTEGER).
_UNLIMITED = 10**9
# Exporters keep the names of parameters; relative and rotary positions have no such table.
_POSITION_TABLE = re.compile(r"(?<!relative_)position_embeddings?\.|embed_positions\.|\bwpe\.")


@dataclass(frozen=True, order=True)
class Limit:
    """The most tokens that a model takes, special ones included, and where that is written."""

    tokens: int
    source: str


def text_limit(model: ModelFile, folder: CheckpointFolder, task: str) -> Limit | None:
    """Return the smallest limit set for texts, or None where there is none.

    The export's stamp says how many tokens the model takes; of a file without one, as other tools write them, it is
    deduced from the graph and the checkpoint's files.

    Raises:
        InputError: a file of the checkpoint is malformed.
        ModelFileError: the stamp is no number of tokens.
    """
    stamped = [limit for limit in (_stamped_limit(model, MAX_LENGTH_KEY), verified_limit(model)) if limit is not None]
    limits = (*stamped, *_shape_limit(model)) if stamped else _deduced_limits(model, folder)
    return min((*limits, *_sentence_limit(folder, task)), default=None)


def limit_of_task(model: ModelFile, folder: CheckpointFolder, task: str) -> Limit | None:
    """Return the limit of queries, or of documents, where the checkpoint has one of its own; None where it has none.

    As in sentence-transformers it takes the place of the limit of texts, longer or shorter: up to what the graph takes.

    Args:
        model: the file.
        folder: of the checkpoint.
        task: `query` or `document`.
    """
    modules = folder.sentence_modules
    length = modules.stated_length(task)
    if length is None:
        return None
    own = Limit(length, f"the length of a {task} in {modules.transformer_file}")
    return min((own, *_graph_limits(model, reserved_positions(folder))))


def graph_limit(model: ModelFile, folder: CheckpointFolder | None) -> Limit | None:
    """Return the limit beyond which the graph fails or was not verified; None where none shows, or without tokens."""
    if all(info.dtype.startswith("float") for info in model.structure.inputs):
        return None  # pictures and sound; their positions are of patches and frames
    return min(_graph_limits(model, reserved_positions(folder)), default=None)


def verified_limit(model: ModelFile) -> Limit | None:
    """Return up to which length export compared the file with the checkpoint; None where it did not.

    Raises:
        ModelFileError: the stamp is no number of tokens.
    """
    return _stamped_limit(model, VERIFIED_LENGTH_KEY)


def reserved_positions(folder: CheckpointFolder | None) -> int:
    """Return how many rows at the start of the position table no token ever uses."""
    config = folder.read("config.json") if folder else {}
    if str(config.get("model_type")) not in _PADDED_POSITIONS:
        return 0
    pad_id = _integer(config, "pad_token_id")
    return (_DEFAULT_PAD_ID if pad_id is None else pad_id) + 1


def fixed_shape(model: ModelFile) -> tuple[int | None, int | None]:
    """Return the batch size and the sequence length that the graph is fixed to, None where an axis is dynamic."""
    for info in model.structure.inputs:
        if info.name == "input_ids" and len(info.shape) == 2:
            batch, sequence = info.shape
            return batch if isinstance(batch, int) else None, sequence if isinstance(sequence, int) else None
    return None, None


def _stamped_limit(model: ModelFile, key: str) -> Limit | None:
    stamped = model.metadata_number(key)
    return None if stamped is None else Limit(stamped, f"{key} of the model's metadata")


def _sentence_limit(folder: CheckpointFolder, task: str) -> Iterator[Limit]:
    modules = folder.sentence_modules
    if modules.max_sequence_length is not None and task in _SENTENCE_TASKS:
        yield Limit(modules.max_sequence_length, f"max_seq_length of {modules.transformer_file}")


def _deduced_limits(model: ModelFile, folder: CheckpointFolder) -> Iterator[Limit]:
    tokens = _integer(folder.read("tokenizer_config.json"), "model_max_length")
    if tokens is not None and 0 < tokens < _UNLIMITED:
        yield Limit(tokens, "model_max_length of tokenizer_config.json")
    config = folder.read("config.json")
    for key in ("max_position_embeddings", "n_positions"):
        tokens = _integer(config, key)
        if tokens is not None and tokens > 0:  # XLNet writes -1 for no limit
            yield Limit(tokens - reserved_positions(folder), f"{key} of config.json")
    yield from _graph_limits(model, reserved_positions(folder))


def _shape_limit(model: ModelFile) -> Iterator[Limit]:
    sequence_length = fixed_shape(model)[1]
    if sequence_length is not None:
        yield Limit(sequence_length, "the shape of the input input_ids")


def _graph_limits(model: ModelFile, reserved: int) -> Iterator[Limit]:
    yield from _shape_limit(model)
    verified = verified_limit(model)
    if verified is not None:
        yield verified
    rows = {tensor.name: tensor.dims[0] for tensor in model.structure.initializers if len(tensor.dims) == 2}
    named = (named_inputs(node.domain, node.op_type, node.inputs) for node in read_nodes(model.path))
    fused = {inputs.get("position_embedding") for inputs in named}
    for name, length in rows.items():
        if name in fused or _POSITION_TABLE.search(name):
            yield Limit(length - reserved, f"the rows of {name}")


def _integer(config: dict[str, Json], key: str) -> int | None:
    value = config.get(key)
    # model_max_length is written as 1e30 by some tokenizers, which JSON reads as a float.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
