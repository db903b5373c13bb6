"""Late-interaction encoders of three libraries have one description; what is malformed is refused by its name."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.late_interaction import QueryExpansion
from onnxtool.checkpoint.module_forms import PoolingModule
from onnxtool.checkpoint.pooling_modules import Dense, Normalize
from onnxtool.checkpoint.token_modules import MultiVectorMask, read_mask, read_token_modules
from onnxtool.errors import InputError
from onnxtool.runtime.computed_modules import compute
from tests.checkpoint.test_pooling_modules import MASK, head_of, run_head
from tests.module_files import write_modules

PYLATE = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 16}
DENSE = {"in_features": 7, "out_features": 3, "bias": False, "activation_function": "torch.nn.Identity"}
PUNCTUATION = tuple(string.punctuation)


def saved(
    folder: Path,
    *modules: tuple[str, dict[str, Any]],
    encoder: dict[str, Any] | None = None,
    transformer: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> CheckpointFolder:
    """Write the files of an encoder; a Dense has weights."""
    encoder = {"model_type": "MultiVectorEncoder"} if encoder is None else encoder
    files: Any = {"sentence_bert_config": transformer or {}, "config": {"model_type": "bert", **(config or {})}}
    write_modules(folder, *modules, config_sentence_transformers=encoder, **files)
    for path in folder.glob("*Dense"):
        save_file({"linear.weight": np.ones((3, 7), np.float32)}, str(path / "model.safetensors"))
    return CheckpointFolder(folder)


def stanford(folder: Path, metadata: Any = None, weights: dict[str, Any] | None = None) -> CheckpointFolder:
    """Write the files of Stanford's layout."""
    (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["HF_ColBERT"]}')
    if metadata is not None:
        content = metadata if isinstance(metadata, str) else json.dumps(metadata)
        (folder / "artifact.metadata").write_text(content)
    if weights is not None:
        save_file(weights, str(folder / "model.safetensors"))
    return CheckpointFolder(folder)


def fixed(length: int, *, attend: bool = False) -> dict[str, Any]:
    """Return the usual expansion."""
    return {"strategy": "fixed", "attend": attend, "length": length}


@pytest.mark.parametrize(
    ("encoder", "expansion", "skipped"),
    [
        (PYLATE, fixed(16), PUNCTUATION),
        ({**PYLATE, "attend_to_expansion_tokens": True, "skiplist_words": []}, fixed(16, attend=True), ()),
        ({**PYLATE, "query_length": None, "skiplist_words": ["a"]}, fixed(32), ("a",)),
        ({**PYLATE, "do_query_expansion": False}, None, PUNCTUATION),
        ({**PYLATE, "query_expansion": None}, None, PUNCTUATION),
        ({key: value for key, value in PYLATE.items() if key != "model_type"}, fixed(16), PUNCTUATION),
    ],
)
def test_settings_of_pylate_are_those_of_sentence_transformers(
    tmp_path: Path, encoder: dict[str, Any], expansion: dict[str, Any] | None, skipped: tuple[str, ...]
) -> None:
    """Among the encoder's settings there, among the modules here; what it computes inline is a module."""
    folder = saved(tmp_path, ("pylate.models.Dense.Dense", DENSE), encoder=encoder)
    modules = folder.sentence_modules
    assert modules.kinds == ("Transformer", "Dense", "MultiVectorMask", "Normalize")
    assert modules.transformer.get("query_expansion") == expansion
    assert modules.encoder["prompts"] == {"query": "[Q] ", "document": "[D] "}
    assert modules.prefixes == ("[Q] ", "[D] ")
    mask = read_mask(modules)
    assert mask is not None
    assert mask.skipped == skipped
    dense, _, scale = read_token_modules(modules)
    with pytest.raises(InputError, match="has no modules"):
        read_token_modules(replace(modules, modules=()))
    assert dense.on_tokens
    assert scale == Normalize(on_tokens=True)


def test_a_prompt_of_pylate_stands_behind_its_prefix(tmp_path: Path) -> None:
    """Once, where the prompt was saved with the prefix."""
    encoder = {**PYLATE, "prompts": {"query": "find: ", "document": "[D] text: ", "other": "o"}}
    prompts = saved(tmp_path, ("Dense", DENSE), encoder=encoder).sentence_modules.encoder["prompts"]
    assert prompts == {"query": "[Q] find: ", "document": "[D] text: ", "other": "o"}


def test_settings_of_stanford_stand_in_its_metadata(tmp_path: Path) -> None:
    """The projection is a weight of the transformer's file, of the shape that it has there."""
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    metadata = {"doc_maxlen": 50, "query_maxlen": 20, "attend_to_mask_tokens": True, "mask_punctuation": False}
    modules = stanford(tmp_path, metadata, {"linear.weight": weight, "bert.x": weight}).sentence_modules
    assert modules.transformer == {"query_expansion": fixed(20, attend=True), "document_length": 50}
    assert modules.prefixes == ("[unused0] ", "[unused1] ")
    assert modules.stated_length("query") == 20
    assert modules.stated_length("document") == 50
    dense, mask, _ = read_token_modules(modules)
    assert isinstance(dense, Dense)
    np.testing.assert_array_equal(dense.weight, weight)
    assert mask == MultiVectorMask()


def test_an_embedder_is_no_late_interaction(tmp_path: Path) -> None:
    """Nor is a checkpoint without any of the files."""
    folder = saved(tmp_path, ("Pooling", {}), encoder={"model_type": "SentenceTransformer"})
    assert not folder.sentence_modules.is_late_interaction
    (tmp_path / "empty").mkdir()
    assert not CheckpointFolder(tmp_path / "empty").sentence_modules.is_late_interaction


TOKENS = {"module_input_name": "token_embeddings"}


@pytest.mark.parametrize(
    ("modules", "settings", "message"),
    [
        (
            (("HierarchicalTokenPooling", {}),),
            {},
            r"has the modules .*, HierarchicalTokenPooling, and onnxtool computes late",
        ),
        ((("Pooling", {}),), {}, r"has the modules .*, Pooling, and onnxtool computes late interaction"),
        ((("other.Mask", {}),), {}, r"has the modules .*, other.Mask, and"),
        ((("Dense", {**DENSE, "module_input_name": "sentence_embedding"}),), {}, "projects a text's vector"),
        ((("Dense", {**DENSE, "module_output_name": "other"}),), {}, "makes other of token_embeddings"),
        ((("Dense", {**DENSE, **TOKENS, "in_features": 9}),), {}, r"linear.weight in 1_Dense .* shape \[3, 7\]"),
        (
            (("MultiVectorMask", {"skiplist_words": "a"}),),
            {},
            "skiplist_words of .* is 'a', which is not a list of tokens",
        ),
        ((("MultiVectorMask", {"keep_only_token_ids": ["a"]}),), {}, "is not a list of ids"),
        ((("MultiVectorMask", {"skiplist_tasks": {"a": 1}}),), {}, "skiplist_tasks .* is not a list of tokens"),
        ((("MultiVectorMask", {"other": 1}),), {}, "settings other, which onnxtool does not know"),
        ((), {"query_expansion": {"strategy": "max", "length": 3}}, "expands queries by .* knows the strategies"),
        ((), {"query_expansion": "fixed"}, "expands queries by 'fixed'"),
        ((), {"query_expansion": fixed(10**9)}, "expands queries to 1000000000 tokens"),
        ((), {"query_expansion": {**fixed(3), "length": True}}, "expands queries by"),
        ((), {"query_expansion": {**fixed(3), "more": 1}}, "expands queries by"),
        ((), {"query_expansion": fixed(9), "query_length": 8}, "cuts queries to 8 tokens and expands them to 9"),
        ((), {"document_length": "all"}, "document_length 'all'"),
        ((), {"transformer_task": "retrieval"}, "transformer_task 'retrieval'"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, modules: tuple[Any, ...], settings: dict[str, Any], message: str
) -> None:
    """By its name, and before anything is exported."""
    with pytest.raises(InputError, match=message):
        read_token_modules(saved(tmp_path, *modules, transformer=settings).sentence_modules)


@pytest.mark.parametrize(
    ("metadata", "weights", "message"),
    [
        ("{", None, "artifact.metadata is malformed: not JSON"),
        ("[]", None, "artifact.metadata is malformed: not a JSON object"),
        ({"query_token_id": 7}, None, "query_token_id is 7, which is not a text"),
        ({"query_maxlen": "long"}, None, "expands queries by .*'long'"),
        ({"doc_maxlen": -1}, None, "document_length -1 of artifact.metadata"),
        ({}, None, "has no weights"),
        ({}, {"bert.x": np.zeros(2, np.float32)}, "linear.weight .* is missing"),
        ({}, {"linear.weight": np.zeros(2, np.float32)}, r"linear.weight .* is of shape \[2\]"),
    ],
)
def test_a_damaged_checkpoint_of_stanford_is_one_error(
    tmp_path: Path, metadata: Any, weights: dict[str, Any] | None, message: str
) -> None:
    """Whatever is wrong with it."""
    with pytest.raises(InputError, match=message):
        read_token_modules(stanford(tmp_path, metadata, weights).sentence_modules)


def test_a_truncated_file_of_weights_and_a_pickle_are_refused(tmp_path: Path) -> None:
    """The pickle without a look into it."""
    folder = stanford(tmp_path, {}, {"linear.weight": np.zeros((2, 3), np.float32)})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20])
    with pytest.raises(InputError, match="cannot read .*model.safetensors"):
        read_token_modules(folder.sentence_modules)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="has its weights only in a pickle"):
        read_token_modules(folder.sentence_modules)


@pytest.mark.parametrize(
    ("settings", "tokens", "pads_left", "message"),
    [
        ({}, (None, None), False, "by a mask token, and its tokenizer has none"),
        ({"token": "[X]"}, ("[MASK]", None), False, r"by '\[X\]', no token of its own"),
        ({"strategy": "min"}, ("[MASK]", None), True, "pads on the left .* depend on the queries"),
        ({}, ("[MASK]", None), True, "pads on the left .* vectors of nothing"),
    ],
)
def test_an_expansion_that_a_tokenizer_cannot_make_is_refused(
    tmp_path: Path, settings: dict[str, Any], tokens: tuple[str | None, ...], pads_left: bool, message: str
) -> None:
    """Rather than made of another token."""
    folder = saved(tmp_path, transformer={"query_expansion": {**fixed(4), **settings}})
    expansion = QueryExpansion.of(folder.sentence_modules, folder)
    assert expansion is not None
    with pytest.raises(InputError, match=message):
        expansion.find_token({"[MASK]": 4}.get, tokens, folder, pads_left=pads_left)


@pytest.mark.parametrize(
    ("mask", "task", "counted"),
    [
        (MultiVectorMask(("a",)), "document", (False, True, True)),
        (MultiVectorMask(("a",)), None, (False, True, True)),
        (MultiVectorMask(("a",)), "query", (True, True, True)),
        (MultiVectorMask(("a",), ("query", "document")), "query", (False, True, True)),
        (MultiVectorMask((), (), kept_ids=frozenset({1, 2})), "document", (True, True, False)),
        (MultiVectorMask(("a",), kept_ids=frozenset({1, 2})), "document", (False, True, False)),
        (MultiVectorMask((), (), kept_ids=frozenset({1, 2})), "query", (True, True, True)),
    ],
)
def test_which_tokens_count(mask: MultiVectorMask, task: str | None, counted: tuple[bool, ...]) -> None:
    """A text of no task counts as a document."""
    assert mask.counted((1, 2, 3), task, {1}) == counted


RANDOM = np.random.default_rng(3)
PROJECTIONS = {
    "plain": Dense("d", RANDOM.standard_normal((3, 7)).astype(np.float32), None, "Identity", None, on_tokens=True),
    "residual": Dense(
        "d", RANDOM.standard_normal((3, 7)).astype(np.float32), RANDOM.standard_normal(3).astype(np.float32), "GELU",
        RANDOM.standard_normal((3, 7)).astype(np.float32), on_tokens=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_modules_of_tokens_are_equal_in_all_forms(projection: str, opset: int) -> None:
    """The head in a graph, by itself, and PyTorch, for a vector of each token."""
    modules: tuple[PoolingModule, ...] = (PROJECTIONS[projection], MultiVectorMask(("a",)), Normalize(on_tokens=True))
    values = np.random.default_rng(0).standard_normal((4, 5, 7)).astype(np.float32)
    expected = torch.from_numpy(values)
    for module in modules:
        expected = module.reference(torch, expected, torch.from_numpy(MASK))
    _, (built,) = run_head(replace(head_of(*modules), keeps_tokens=True), values, opset=opset)
    assert built.shape == (4, 5, 3)
    np.testing.assert_allclose(compute(modules, values), expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(built, expected.numpy(), atol=1e-6)
