"""Each module of sentence-transformers computes its definition: in a graph, as a model of its own, and in PyTorch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from sentence_transformers.cross_encoder import modules as reference_modules
from sentence_transformers.sentence_transformer import modules as sentence_modules

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.module_forms import (
    ACTIVATIONS,
    POOLING_MASK,
    POOLING_MODES,
    PoolingModule,
    activation_name,
    behind_prompts,
    sigmoid,
)
from onnxtool.checkpoint.pooling_modules import (
    Activation,
    Dense,
    LayerNorm,
    LogitScore,
    Normalize,
    Pooling,
    Truncate,
    read_pooling_modules,
)
from onnxtool.checkpoint.sentence_modules import StoredModule
from onnxtool.checkpoint.sparse_modules import LargestTerms, SpladePooling
from onnxtool.errors import InputError
from onnxtool.export.heads.head import GraphHead, append_head
from onnxtool.runtime.computed_modules import compute
from tests.module_files import write_modules

# Rows without padding, padded on the right, on the left, and of a single token.
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=np.int64)
# All but the first two tokens of each text, which leaves none of the last one; of padding it says nothing.
POOLED = np.array([[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 1], [0, 0, 1, 0, 1]], dtype=np.int64)
OPSETS = (13, 18, 20)  # operators changed in 18
# float32, a handful of operations on numbers around 1.
CLOSE = 2e-6


def head_of(*modules: PoolingModule) -> GraphHead:
    """Make a head of `modules` over an output `raw`."""
    return GraphHead("test", "raw", "vector", "sentence-similarity", modules)


def run_head(
    head: GraphHead, values: NDArray[Any], opset: int = 17, *, keep_raw: bool = False
) -> tuple[list[str], list[NDArray[Any]]]:
    """Put the head on a graph that hands `values` [B, S, N] through, and run it in ONNX's reference implementation."""
    dtype = ir.DataType.from_numpy(values.dtype)
    mask = ir.val("attention_mask", dtype=ir.DataType.INT64, shape=["batch_size", "sequence"])
    fed = ir.val("fed", dtype=dtype, shape=["batch_size", "sequence", values.shape[-1]])
    through = ir.node("Identity", [fed])
    through.outputs[0].name = head.source
    through.outputs[0].type, through.outputs[0].shape = fed.type, fed.shape
    graph = ir.Graph([fed, mask], through.outputs, nodes=[through], opset_imports={"": opset}, name="g")
    model = ir.Model(graph, ir_version=8)
    append_head(model, head, keep_raw=keep_raw)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    feeds = {"fed": values, "attention_mask": MASK, POOLING_MASK: POOLED}
    names = [value.name for value in proto.graph.input]
    found = onnx.reference.ReferenceEvaluator(proto).run(None, {name: feeds[name] for name in names})
    return [output.name for output in proto.graph.output], [np.asarray(array) for array in found]


def vectors(head: GraphHead, values: NDArray[Any], opset: int = 17) -> NDArray[Any]:
    """Return what the graph gives."""
    _, (output,) = run_head(head, values, opset)
    return output


def in_torch(head: GraphHead, values: NDArray[Any]) -> NDArray[Any]:
    """Return what the head gives in PyTorch."""
    return np.asarray(head.reference(*map(torch.from_numpy, (values, MASK, POOLED))))


@pytest.fixture
def values() -> NDArray[np.float32]:
    """[4, 5, 7], with padding larger than anything real."""
    values = np.random.default_rng(0).standard_normal((4, 5, 7)).astype(np.float32)
    values[MASK == 0] += 100
    return values


def pooled_by_hand(tokens: NDArray[Any], mode: str) -> NDArray[np.float64]:
    """Pool the real tokens of one text, [S, H], by the definition of `mode`."""
    tokens, count = tokens.astype(np.float64), len(tokens)
    weights = np.arange(1, count + 1)[:, None]
    by_definition = {
        "cls": tokens[0],
        "lasttoken": tokens[-1],
        "max": tokens.max(axis=0),
        "mean": tokens.mean(axis=0),
        "mean_sqrt_len_tokens": tokens.sum(axis=0) / math.sqrt(count),
        "weightedmean": (tokens * weights).sum(axis=0) / weights.sum(),
    }
    return np.asarray(by_definition[mode])


def require_all_forms(modules: tuple[PoolingModule, ...], values: NDArray[Any], expected: Any, opset: int) -> None:
    """Compare graph, PyTorch and NumPy with what the definition gives."""
    head = head_of(*modules)
    np.testing.assert_allclose(vectors(head, values, opset), expected, atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(in_torch(head, values), expected, atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(compute(modules, values, MASK.astype(bool)), expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("mode", POOLING_MODES)
def test_each_pooling_reads_real_tokens_only(values: NDArray[np.float32], mode: str, opset: int) -> None:
    """On either side of padding, as its definition by hand."""
    expected = np.stack([pooled_by_hand(row[mask == 1], mode) for row, mask in zip(values, MASK, strict=True)])
    require_all_forms((Pooling((mode,)),), values, expected, opset)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("mode", POOLING_MODES)
def test_a_pooling_may_leave_the_prompt_out(values: NDArray[np.float32], mode: str, opset: int) -> None:
    """As sentence-transformers' own, with padding on either side, and for a text that is nothing but prompt."""
    theirs = sentence_modules.Pooling(7, mode, include_prompt=False)
    states, mask = torch.from_numpy(values), torch.from_numpy(MASK)
    features = {"token_embeddings": states, "attention_mask": mask, "prompt_length": 2}
    expected = theirs(features)["sentence_embedding"].numpy()
    pooling = Pooling((mode,), includes_prompt=False)
    head = head_of(pooling)
    for found in (
        vectors(head, values, opset),
        in_torch(head, values),
        compute((pooling,), values, MASK > 0, behind_prompts(MASK > 0, [2] * len(MASK))),
    ):
        np.testing.assert_allclose(found, expected, atol=CLOSE, rtol=CLOSE)
    with_prompt = Pooling((mode,))
    assert not np.allclose(expected, compute((with_prompt,), values, MASK > 0))


@pytest.mark.parametrize("false", [None, 1])
def test_a_score_is_what_the_last_token_says(values: NDArray[np.float32], false: int | None) -> None:
    """As LogitScore of sentence-transformers, which reads the last position: texts are padded on the left there."""
    theirs = reference_modules.LogitScore(4, false)
    last = [torch.from_numpy(row[mask == 1][-1:]) for row, mask in zip(values, MASK, strict=True)]
    expected = theirs({"causal_logits": torch.stack(last)})["scores"].numpy()
    require_all_forms((LogitScore(4, false),), values, expected, 13)
    assert LogitScore(4, false).width(7) == 1
    with pytest.raises(ValueError, match="reads token 4, and there are 4 tokens"):
        LogitScore(4, false).width(4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "true_token_id None"),
        ({"true_token_id": -1}, "are not tokens"),
        ({"true_token_id": 1, "false_token_id": True}, "false_token_id True"),
        ({"true_token_id": 1.5}, "true_token_id 1.5"),
        ({"true_token_id": 1, "module_input_name": "scores"}, "reads 'scores'"),
        ({"true_token_id": 1, "temperature": 2}, "has the settings temperature"),
    ],
)
def test_a_score_of_no_tokens_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    """By what its file says."""
    kind = "sentence_transformers.cross_encoder.modules.LogitScore"
    write_modules(tmp_path, (kind, settings), sentence_bert_config={"transformer_task": "text-generation"})
    with pytest.raises(InputError, match=reason):
        read_pooling_modules(CheckpointFolder(tmp_path).sentence_modules, LogitScore)


def test_more_than_there_is_of_a_vector_is_all_of_it(tmp_path: Path, values: NDArray[np.float32]) -> None:
    """In a graph, whose numbers have 64 bits; JSON may have whole numbers of any length."""
    stored = StoredModule("", "", {"truncate_dim": 10**400, "max_active_dims": 10**400}, CheckpointFolder(tmp_path))
    whole = vectors(head_of(Pooling()), values)
    np.testing.assert_array_equal(vectors(head_of(Pooling(), Truncate.read(stored)), values), whole)
    np.testing.assert_array_equal(
        vectors(head_of(SpladePooling(), LargestTerms.read(stored)), values), vectors(head_of(SpladePooling()), values)
    )


def test_several_poolings_are_concatenated(values: NDArray[np.float32]) -> None:
    """In the order in which they are named."""
    both = vectors(head_of(Pooling(("max", "cls"))), values)
    np.testing.assert_array_equal(both[:, :7], vectors(head_of(Pooling(("max",))), values))
    np.testing.assert_array_equal(both[:, 7:], vectors(head_of(Pooling(("cls",))), values))
    alone = compute((Pooling(("max", "cls")),), values.astype(np.float16), MASK.astype(bool))
    assert alone.dtype == np.float32
    np.testing.assert_array_equal(alone, both.astype(np.float16))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("activation", SpladePooling.ACTIVATIONS)
@pytest.mark.parametrize("strategy", SpladePooling.STRATEGIES)
def test_splade_activates_every_real_token_and_pools(
    values: NDArray[np.float32], strategy: str, activation: str, opset: int
) -> None:
    """Computed a row, a term and a token at a time."""

    def activate(value: float) -> float:
        weight = math.log1p(max(0.0, value))
        return math.log1p(weight) if activation == "log1p_relu" else weight

    pool = max if strategy == "max" else sum
    expected = [
        [pool([activate(float(row[s, v])) for s in range(5) if mask[s]]) for v in range(7)]
        for row, mask in zip(values, MASK, strict=True)
    ]
    require_all_forms((SpladePooling(strategy, activation),), values, expected, opset)


@pytest.mark.parametrize(
    ("activation", "opset"), [*((name, 17) for name in ACTIVATIONS), *(("GELU", opset) for opset in OPSETS)]
)
def test_a_chain_of_modules_is_computed_in_order(values: NDArray[np.float32], activation: str, opset: int) -> None:
    """Mean, two projections, layer norm, length 1: in both graphs as in PyTorch."""
    source = np.random.default_rng(1)
    first = source.standard_normal((6, 7)).astype(np.float32)
    second = source.standard_normal((3, 6)).astype(np.float32)
    modules = (
        Pooling(("mean",)),
        Dense("2_Dense", first, source.standard_normal(6).astype(np.float32), activation),
        Dense("3_Dense", second, None, activation, residual=second * 2),
        LayerNorm("4_LayerNorm", np.array([1, 2, 3], np.float32), np.array([0.5, 0, 1], np.float32)),
        Normalize(),
    )
    output = vectors(head_of(*modules), values, opset)
    assert output.shape == (4, 3)
    np.testing.assert_allclose(np.linalg.norm(output, axis=1), 1.0, atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(output, in_torch(head_of(*modules), values), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(compute(modules, values, MASK.astype(bool)), output, atol=1e-5, rtol=1e-5)
    swapped = vectors(head_of(modules[0], Normalize(), *modules[1:4]), values, opset)
    assert np.abs(swapped - output).max() > 0.1  # order is meaning


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("count", [1, 3, 7, 50])
def test_the_largest_terms_are_kept(values: NDArray[np.float32], count: int, opset: int) -> None:
    """By their absolute value, and the rest is 0; a small vocabulary is kept whole."""
    pooled = np.where(MASK[..., None] == 1, values, -np.inf).max(axis=1)
    expected = np.zeros_like(pooled)
    for row, weights in enumerate(pooled):
        for term in sorted(range(len(weights)), key=lambda term: -abs(weights[term]))[:count]:
            expected[row, term] = weights[term]
    require_all_forms((Pooling(("max",)), LargestTerms(count)), values, expected, opset)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("dimensions", [1, 3, 7, 50])
def test_the_first_dimensions_are_kept(values: NDArray[np.float32], dimensions: int, opset: int) -> None:
    """As they are: a part of a vector of length 1 is shorter."""
    unit = vectors(head_of(Pooling(), Normalize()), values, opset)
    modules = (Pooling(), Normalize(), Truncate(dimensions))
    require_all_forms(modules, values, unit[:, :dimensions], opset)
    assert head_of(*modules).width(7) == min(dimensions, 7)


def test_half_precision_is_pooled_in_single() -> None:
    """Sums over tokens overflow float16; the result is of the model's dtype all the same."""
    large = np.full((4, 5, 7), 30000, dtype=np.float16)
    output = vectors(head_of(Pooling(("mean",))), large)
    assert output.dtype == np.float16
    np.testing.assert_array_equal(output, np.full((4, 7), 30000, dtype=np.float16))


@pytest.mark.parametrize("length", [0.0, 1e-10, 1e-15])
def test_only_vectors_shorter_than_pytorch_s_epsilon_are_left_short(length: float) -> None:
    """1e-12 in all three forms: a vector of length 1e-10 is scaled to 1, one of zeros stays."""
    values = np.full((4, 5, 4), length / 2, np.float32)
    expected = np.full((4, 4), length / 2 / max(length, 1e-12))
    require_all_forms((Pooling(), Normalize()), values, expected, 17)


def test_probabilities_do_not_overflow() -> None:
    """Logits of fp16's range are fine."""
    np.testing.assert_allclose(sigmoid(np.array([-6e4, 0.0, math.log(3.0), 6e4])), [0.0, 0.5, 0.75, 1.0], rtol=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_torch(name: str) -> None:
    """By their class, with its defaults."""
    values = np.linspace(-6, 6, 101, dtype=np.float32)
    wanted = getattr(torch.nn, name)().eval()(torch.from_numpy(values)).numpy()
    assert activation_name(f"torch.nn.modules.activation.{name}") == name
    np.testing.assert_allclose(compute((Activation(name),), values[None])[0], wanted, atol=1e-6)


@pytest.mark.parametrize("path", ["torch.nnx.Tanh", "torch.nn.Softmax", "mine.Tanh", "Tanh", None])
def test_other_activations_are_none_of_ours(path: str | None) -> None:
    """A package whose name only begins like torch.nn is another one."""
    assert activation_name(path) is None


def written(folder: Path, *modules: tuple[str, dict[str, Any]]) -> CheckpointFolder:
    """Write the files of modules after a transformer."""
    return CheckpointFolder(write_modules(folder, *modules))


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({}, ("mean",)),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, ("cls", "max")),
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["max", "mean"], "pooling_mode_cls_token": True}, ("max", "mean")),
    ],
)
def test_pooling_of_any_age_is_read(tmp_path: Path, settings: dict[str, Any], modes: tuple[str, ...]) -> None:
    """Flags of old versions concatenate in the table's order; the name of new ones wins."""
    modules = written(tmp_path, ("Pooling", settings)).sentence_modules
    assert read_pooling_modules(modules, Pooling) == (Pooling(modes),)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Pooling", {"pooling_mode": "attention"})], "unknown pooling mode; onnxtool knows cls"),
        ([("Pooling", {"pooling_mode_attention": True})], "pools with pooling_mode_attention"),
        ([("Pooling", {}), ("WordWeights", {}), ("LSTM", {})], "modules LSTM, WordWeights, which onnxtool does not"),
        ([("Normalize", {}), ("Pooling", {})], "computes Normalize before its Pooling, on sentence_embedding"),
        ([("Pooling", {}), ("Pooling", {})], "pools twice"),
        ([("SpladePooling", {})], "with a Pooling before SpladePooling"),
        (
            [("Pooling", {}), ("Normalize", {"module_input_name": "token_embeddings"})],
            "computes Normalize after its Pooling, on token_e",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, modules: list[tuple[str, dict[str, Any]]], message: str
) -> None:
    """Leaving a module out, or taking it at another place, would give other vectors."""
    with pytest.raises(InputError, match=message):
        read_pooling_modules(written(tmp_path, *modules).sentence_modules, Pooling)


@pytest.mark.parametrize("settings", [{"pooling_strategy": "mean"}, {"activation_function": "gelu"}])
def test_an_unknown_splade_pooling_is_refused(tmp_path: Path, settings: dict[str, str]) -> None:
    """Rather than taken for the usual one."""
    with pytest.raises(InputError, match="weighs terms by .*(mean|gelu)"):
        read_pooling_modules(written(tmp_path, ("SpladePooling", settings)).sentence_modules, SpladePooling)


def test_a_pooling_whose_file_is_missing_is_refused(tmp_path: Path) -> None:
    """A checkpoint that was copied in part would be pooled by the mean, whatever it was trained with."""
    stored = StoredModule("Pooling", "1_Pooling", {}, CheckpointFolder(tmp_path))
    with pytest.raises(InputError, match=r"1_Pooling/config\.json is malformed: it is missing or unreadable"):
        Pooling.read(stored)


def test_modules_for_training_and_of_transformers_of_any_kind_are_passed_over(tmp_path: Path) -> None:
    """MLMTransformer is the Transformer of older sparse encoders."""
    folder = written(tmp_path, ("SpladePooling", {}), ("Dropout", {}), ("Normalize", {}))
    path = tmp_path / "modules.json"
    path.write_text(path.read_text().replace("Transformer", "MLMTransformer"))
    modules = read_pooling_modules(folder.sentence_modules, SpladePooling)
    assert modules == (SpladePooling(), Normalize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_any_float_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """NumPy knows no bfloat16; sentence-transformers computes all of them in float32. Counters are no weights."""
    folder = written(tmp_path, ("Pooling", {}), ("Dense", {"in_features": 3, "out_features": 2}))
    tensors = {"linear.weight": torch.randn(2, 3).to(dtype), "linear.bias": torch.randn(2).to(dtype)}
    counters = {"steps": torch.zeros(3, dtype=torch.int64), "is_tied": torch.tensor(False)}
    save_file({**tensors, **counters}, tmp_path / "2_Dense" / "model.safetensors")
    _, dense = read_pooling_modules(folder.sentence_modules, Pooling)
    assert isinstance(dense, Dense)
    np.testing.assert_array_equal(dense.weight, tensors["linear.weight"].float().numpy())
    assert dense.bias is not None
    np.testing.assert_array_equal(dense.bias, tensors["linear.bias"].float().numpy())


def test_modules_are_those_of_sentence_transformers(tmp_path: Path, values: NDArray[np.float32]) -> None:
    """What its own classes save is read, and gives what they give."""
    base = pytest.importorskip("sentence_transformers.base.modules")
    own = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    torch.manual_seed(0)
    saved = [
        own.Pooling(7, pooling_mode=("weightedmean", "mean_sqrt_len_tokens", "cls")),
        base.Dense(21, 6, activation_function=torch.nn.GELU()),
        own.LayerNorm(6),
        base.Dense(6, 3, bias=False, use_residual=True, activation_function=torch.nn.SiLU()),
        base.Normalize(),
    ]
    listed = [{"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]
    for place, module in enumerate(saved, start=1):
        path = tmp_path / f"{place}_{type(module).__name__}"
        path.mkdir()
        module.save(str(path))
        listed.append({"path": path.name, "type": f"{type(module).__module__}.{type(module).__name__}"})
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    modules = read_pooling_modules(CheckpointFolder(tmp_path).sentence_modules, Pooling)
    features = {"token_embeddings": torch.from_numpy(values), "attention_mask": torch.from_numpy(MASK)}
    with torch.inference_mode():
        for module in saved:
            features = module.eval()(features)
    require_all_forms(modules, values, features["sentence_embedding"].numpy(), 17)


def sparse_encoder(folder: Path, saved: Any, **config: Any) -> CheckpointFolder:
    """Write a Pooling and `saved`, a SparseAutoEncoder, as SparseEncoder of sentence-transformers does."""
    checkpoint = written(folder, ("Pooling", {}), ("SparseAutoEncoder", {}))
    saved.save(str(folder / "2_SparseAutoEncoder"))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder", **config}))
    return checkpoint


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(("k", "normalize", "config"), [(3, True, {}), (8, False, {"max_active_dims": 2})])
def test_a_sparse_autoencoder_keeps_the_largest_latents(
    tmp_path: Path, values: NDArray[np.float32], k: int, normalize: bool, config: dict[str, int], opset: int
) -> None:
    """As sentence-transformers' own, with what it saves; the model's own limit comes before the module's."""
    own = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    torch.manual_seed(0)
    saved = own.SparseAutoEncoder(7, hidden_dim=9, k=k, normalize=normalize).eval()
    for parameter in (saved.pre_bias, saved.latent_bias):
        torch.nn.init.normal_(parameter)
    modules = read_pooling_modules(sparse_encoder(tmp_path, saved, **config).sentence_modules, Pooling)
    pooled = torch.from_numpy(compute(modules[:1], values, MASK.astype(bool)))
    with torch.inference_mode():
        features = saved({"sentence_embedding": pooled}, **config)
    expected = features["sentence_embedding"].numpy()
    assert (np.count_nonzero(expected, axis=1) <= config.get("max_active_dims", k)).all()
    require_all_forms(modules, values, expected, opset)


@pytest.mark.parametrize("config", [{"max_active_dims": 10}, {"max_active_dims": "all"}])
def test_more_latents_than_there_are_cannot_be_kept(tmp_path: Path, config: dict[str, Any]) -> None:
    """The error says where the number stands."""
    own = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    folder = sparse_encoder(tmp_path, own.SparseAutoEncoder(7, hidden_dim=9, k=3), **config)
    with pytest.raises(InputError, match="keeps the (10|all) largest of 9 latents") as caught:
        read_pooling_modules(folder.sentence_modules, Pooling)
    assert "max_active_dims" in caught.value.hint
