"""What a target needs: chosen by what a checkpoint is, put on the graph, and refused where it cannot be met."""

from __future__ import annotations

import hashlib
import json
import pkgutil
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from onnxtool import ExportOptions, export_model
from onnxtool.checkpoint.files import M3_FILES
from onnxtool.checkpoint.pooling_modules import Dense, Normalize, Pooling
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.errors import TargetError
from onnxtool.export import targets
from onnxtool.export.preparation import Request, output_paths, prepare
from onnxtool.export.source import Source
from onnxtool.export.target_specification import COMPUTED, TargetSpecification, class_of, usage_for
from onnxtool.export.targets import TARGETS, Usage
from onnxtool.export.targets.fastembed import other_than_colbert
from onnxtool.export.targets.opensearch import weights_by_text
from onnxtool.model_file import ModelFile
from tests.module_files import write_modules
from tests.workshop import WORDS, Workshop, load_script

MEAN, CLS, MAX = Pooling(("mean",)), Pooling(("cls",)), Pooling(("max",))
DENSE = Dense("2_Dense", np.zeros((2, 4), np.float32), None, "Tanh")


def specification(
    target: str, folder: Path, tokenizer: Any = None, usage: Usage | None = None, **facts: Any
) -> TargetSpecification:
    """Return what a target needs of the model in `folder`, by default of a text encoder that pools by mean."""
    row, source = TARGETS[target], Source.find(str(folder))
    usage = usage or usage_for(row, "sparse-encoding" if target == "anserini" else "sentence-similarity", (MEAN,))
    return class_of(row)(row, usage, source, None, tokenizer, **facts)


@pytest.mark.parametrize(
    ("target", "task", "modules", "output"),
    [
        ("anserini", "sparse-encoding", (SpladePooling(),), "output_idx"),
        ("anserini", "fill-mask", (SpladePooling("sum"),), "output_idx"),
        ("sentence-transformers", "sentence-similarity", (MAX, DENSE), "last_hidden_state"),
        ("sentence-transformers", "sparse-encoding", (SpladePooling("sum"),), "logits"),
        ("optimum", "sentence-similarity", (MAX, DENSE), "last_hidden_state"),
        ("chroma", "sentence-similarity", (MEAN, Normalize()), "last_hidden_state"),
        ("fastembed", "sentence-similarity", (MEAN, Normalize()), "last_hidden_state"),
        ("fastembed", "sentence-similarity", (MAX,), "sentence_embedding"),
        ("fastembed", "sentence-similarity", (MEAN, DENSE), "sentence_embedding"),
        ("fastembed", "sparse-encoding", (SpladePooling(),), "logits"),
        ("opensearch", "sentence-similarity", (MAX, DENSE), "sentence_embedding"),
        ("opensearch", "sparse-encoding", (SpladePooling("sum", "log1p_relu"),), "sparse"),
        ("opensearch", "text-classification", (), "logits"),
        ("infinity", "sentence-similarity", (CLS,), "last_hidden_state"),
        ("milvus", "sentence-similarity", (MEAN, Normalize()), "last_hidden_state"),
        ("vespa", "sentence-similarity", (CLS,), "last_hidden_state"),
        ("vespa", "sentence-similarity", (Pooling(("lasttoken",)),), "sentence_embedding"),
        ("tei", "sentence-similarity", (Pooling(("lasttoken",)),), "last_hidden_state"),
        ("tei", "text-classification", (), "logits"),
        ("transformers.js", "token-classification", (), "logits"),
        ("transformers.js", "sentence-similarity", (MEAN, Normalize()), "last_hidden_state"),
        ("transformers.js", "sentence-similarity", (Pooling(("lasttoken",)),), "sentence_embedding"),
    ],
)
def test_what_a_consumer_cannot_compute_is_in_the_graph(
    target: str, task: str, modules: tuple[Any, ...], output: str
) -> None:
    """And what it can is left to it."""
    assert usage_for(TARGETS[target], task, modules, pads_left=False).outputs[0].name == output


@pytest.mark.parametrize("target", ["fastembed", "vespa", "tei", "transformers.js"])
def test_the_first_token_behind_padding_is_pooled_in_the_graph(target: str) -> None:
    """These take the first place, which is padding where a tokenizer pads on the left."""
    row = TARGETS[target]
    assert usage_for(row, "sentence-similarity", (CLS,), pads_left=False).head == "none"
    assert usage_for(row, "sentence-similarity", (CLS,), pads_left=True).head == "embedding"


@pytest.mark.parametrize(
    ("target", "task", "modules", "message"),
    [
        ("anserini", "sentence-similarity", (MEAN,), "Anserini takes sparse encoders; this model's task is"),
        ("tei", "sparse-encoding", (SpladePooling(),), "takes text encoders, text classifiers"),
        ("tei", "text-generation", (), "this model's task is text-generation"),
        ("vespa", "sparse-encoding", (SpladePooling("sum"),), "needs the sum of log"),
        ("chroma", "sentence-similarity", (CLS,), "Chroma computes pooling by mean, Normalize itself"),
        ("milvus", "sentence-similarity", (MEAN, DENSE), "Milvus computes pooling by mean, Normalize itself"),
        ("milvus", "late-interaction", (), "Milvus takes text encoders; this model's task is late-interaction"),
        ("infinity", "sentence-similarity", (Pooling(("lasttoken",)),), "this checkpoint needs pooling by lasttoken"),
        ("infinity", "sparse-encoding", (SpladePooling(),), "infinity takes text encoders, text classifiers"),
        ("infinity", "late-interaction", (), "infinity takes text encoders, text classifiers; this model's task is"),
        ("opensearch", "late-interaction", (), "this model's task is late-interaction"),
        ("fastembed", "sparse-encoding", (SpladePooling("max", "log1p_relu"),), "would give other answers there"),
    ],
)
def test_a_need_that_cannot_be_met_says_what_to_do(
    target: str, task: str, modules: tuple[Any, ...], message: str
) -> None:
    """With a way out."""
    with pytest.raises(TargetError, match=message) as caught:
        usage_for(TARGETS[target], task, modules, pads_left=False)
    assert caught.value.hint


@pytest.mark.parametrize(("activation", "suits"), [("log1p_relu", True), ("relu", False)])
def test_fastembed_has_one_formula_for_encoders_whose_queries_are_looked_up(activation: str, suits: bool) -> None:
    """The double logarithm, whatever the checkpoint was trained with; others that look queries up have all."""
    modules = (SpladePooling("max", activation),)
    for target in ("sentence-transformers", "opensearch"):
        assert usage_for(TARGETS[target], "sparse-encoding", modules, pads_left=False, looks_up=True)
    if suits:
        usage = usage_for(TARGETS["fastembed"], "sparse-encoding", modules, pads_left=False, looks_up=True)
        assert usage.outputs[0].name == "logits"
        return
    with pytest.raises(TargetError, match=r"fastembed computes the max of log\(1 \+ log\(1 \+ relu\)\)"):
        usage_for(TARGETS["fastembed"], "sparse-encoding", modules, pads_left=False, looks_up=True)


@pytest.mark.parametrize(("opset", "read"), [(17, True), (19, False)])
def test_a_graph_is_of_versions_that_the_consumer_reads(minilm: Path, opset: int, read: bool) -> None:
    """A newer format is declared as the newest that it knows; a newer opset is refused."""
    chroma = specification(
        "chroma", minilm, AutoTokenizer.from_pretrained(minilm), inputs=("input_ids", "attention_mask")
    )
    text = f"""<ir_version: 11, opset_import: ["" : {opset}]>
    g (int64[batch_size, sequence] input_ids, int64[batch_size, sequence] attention_mask)
    => (float[batch_size, sequence, 1] last_hidden_state) {{
        a = Constant <value_ints: ints = [2]> ()
        m = Mul(input_ids, attention_mask) u = Unsqueeze(m, a) last_hidden_state = Cast <to = 1> (u)
    }}"""
    model = ir.from_onnx_text(text)
    if read:
        chroma.adapt(model, 256)
        assert model.ir_version == 8
    else:
        with pytest.raises(TargetError, match="opset 19, and Chroma reads up to 18"):
            chroma.adapt(model, 256)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_layout_is_below_one_folder(target: Any, tmp_path: Path) -> None:
    """So that it can be staged and moved as one."""
    output = tmp_path / ("x.onnx" if target.name == "plain" else "x")
    places = output_paths(target, output, "name")
    assert places.graph.is_relative_to(places.root)
    assert places.files.is_relative_to(places.root)
    assert places.graph.suffix == ".onnx"


def test_a_file_for_a_consumer_of_folders_is_refused(tmp_path: Path) -> None:
    """The hint names the folder."""
    with pytest.raises(TargetError, match=r"reads a folder with model\.onnx in it") as caught:
        output_paths(TARGETS["fastembed"], tmp_path / "x.onnx", "name")
    assert str(tmp_path / "x") in caught.value.hint


def test_anserini_refuses_tokenizers_that_it_does_not_have(minilm: Path) -> None:
    """It reads WordPiece vocabularies, lower-cases, and drops three ids by number."""
    specification("anserini", minilm, AutoTokenizer.from_pretrained(minilm)).accepts()
    cased = AutoTokenizer.from_pretrained(minilm)
    cased.backend_tokenizer.normalizer = None
    with pytest.raises(TargetError, match="lower-cases every text"):
        specification("anserini", minilm, cased).accepts()

    class Shifted:
        backend_tokenizer = cased.backend_tokenizer

        def get_vocab(self) -> dict[str, int]:
            return {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2}

    with pytest.raises(TargetError, match=r"in this vocabulary \[CLS\] is token 1"):
        specification("anserini", minilm, Shifted()).accepts()


def test_a_byte_level_tokenizer_is_no_wordpiece(minilm: Path) -> None:
    """Anserini could not read its vocabulary; fastembed needs a token to pad with."""
    from tokenizers import models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(TargetError, match="WordPiece"):
        specification("anserini", minilm, tokenizer).accepts()
    with pytest.raises(TargetError, match="no padding token"):
        specification("fastembed", minilm, tokenizer).accepts()


def exported(checkpoint: Path, target: str, folder: Path) -> Path:
    """Export for a target into `folder`/m and return that folder."""
    export_model(ExportOptions(str(checkpoint), exporter="torchscript", target=target, output=folder / "m"))
    return folder / "m"


def test_anserini_gets_terms_in_two_graphs_and_a_vocabulary(workshop: Workshop, tmp_path: Path) -> None:
    """One text a time as its Java code asks; many at once, each term with its text, beside it."""
    checkpoint = workshop.checkpoint("tiny-splade")
    folder = exported(checkpoint, "anserini", tmp_path)
    single, many = folder / "tiny-splade-optimized.onnx", folder / "tiny-splade-batched.onnx"
    structure = ModelFile.open(single).structure
    assert [(i.name, i.dtype, i.shape) for i in structure.inputs] == [
        (name, "int64", (1, "sequence")) for name in ("input_ids", "token_type_ids", "attention_mask")
    ]
    assert [(o.name, o.dtype) for o in structure.outputs] == [("output_idx", "int64"), ("output_weights", "float32")]
    assert structure.ir_version <= 9
    lines = (folder / "tiny-splade-vocab.txt").read_text(encoding="utf-8").splitlines()
    assert [lines[0], lines[101], lines[102]] == ["[PAD]", "[CLS]", "[SEP]"]

    ids = np.array([[101, 7592, 2088, 102], [101, 2024, 102, 0]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
    feeds = {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "attention_mask": mask}
    texts, terms, weights = onnxruntime.InferenceSession(many).run(None, feeds)
    assert set(texts) == {0, 1}
    session = onnxruntime.InferenceSession(single)
    for row, length in enumerate((4, 3)):
        one = {name: array[row : row + 1, :length] for name, array in feeds.items()}
        alone, alone_weights = session.run(None, one)
        assert (alone_weights > 0).all()
        assert (np.diff(alone) > 0).all()
        dense = np.zeros((2, len(lines)))
        dense[0, alone] = alone_weights
        dense[1, terms[texts == row]] = weights[texts == row]
        np.testing.assert_allclose(dense[0], dense[1], atol=1e-4)  # float32 of two shapes


def test_tei_gets_the_settings_that_it_reads(workshop: Workshop, minilm: Path, tmp_path: Path) -> None:
    """Newer sentence-transformers write one name in place of flags, and no length where the router demands one."""
    checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "checkpoint"))
    shutil.copyfile(minilm / "modules.json", checkpoint / "modules.json")
    (checkpoint / "1_Pooling").mkdir()
    (checkpoint / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 32, "pooling_mode": "mean"}')
    (checkpoint / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    folder = exported(checkpoint, "tei", tmp_path)
    settings = json.loads((folder / "sentence_bert_config.json").read_text())
    longest = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    assert settings == {"transformer_task": "feature-extraction", "max_seq_length": longest}
    assert [o.name for o in ModelFile.open(folder / "model.onnx").structure.outputs] == ["last_hidden_state"]
    flags = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert flags["pooling_mode_mean_tokens"] is True
    assert flags["pooling_mode_cls_token"] is False


def test_chroma_gets_a_vocabulary_and_models_of_its_length(workshop: Workshop, minilm: Path, tmp_path: Path) -> None:
    """It downloads its own model where vocab.txt is missing, and feeds 256 tokens of every text."""
    unlimited = workshop.checkpoint("tiny-encoder")  # by sentence-transformers
    chroma = specification("chroma", unlimited, AutoTokenizer.from_pretrained(minilm))
    assert chroma.usage.inputs(("input_ids", "attention_mask")) == ("input_ids", "token_type_ids", "attention_mask")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="feeds 256 tokens of every text, and this checkpoint takes 128") as caught:
        chroma.files(tmp_path, 128)
    assert "max_seq_length" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    chroma.files(tmp_path, 512)
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines()[101] == "[CLS]"
    assert "cuts texts to 256 tokens; it scales vectors to length 1" in chroma.note
    assert ";" not in specification("chroma", minilm, scales=True).note  # of 256 tokens


def inference_free(workshop: Workshop, folder: Path) -> Path:
    """Put a Router around a sparse encoder, with a table of weights for queries, in `folder`/checkpoint."""
    checkpoint = folder / "checkpoint"
    document = shutil.copytree(workshop.checkpoint("tiny-splade"), checkpoint / "document_0_Transformer")
    weights = np.random.default_rng(0).uniform(0.5, 2, WORDS).astype(np.float32)
    names = ("query_0_SparseStaticEmbedding", "document_0_Transformer", "document_1_SpladePooling")
    classes = [f"sentence_transformers.models.{name.rpartition('_')[2]}" for name in names]
    routes = {"query": [names[0]], "document": [*names[1:]]}
    files = {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}],
        "router_config.json": {
            "types": dict(zip(names, classes, strict=True)),
            "structure": routes,
            "parameters": {"default_route": "document"},
        },
        f"{names[0]}/config.json": {"frozen": True},
        f"{names[2]}/config.json": {"pooling_strategy": "max", "activation_function": "log1p_relu"},
        f"{names[1]}/sentence_bert_config.json": {"transformer_task": "fill-mask", "max_seq_length": 128},
    }
    for name, content in files.items():
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text(json.dumps(content))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(document / name, checkpoint / names[0] / name)
    save_file({"weight": weights}, checkpoint / names[0] / "model.safetensors")
    return checkpoint


def test_queries_of_an_inference_free_encoder_weigh_the_same_in_its_consumers(
    workshop: Workshop, tmp_path: Path
) -> None:
    """OpenSearch gets archives of documents and of queries, with the hashes that it checks; fastembed idf.json."""
    checkpoint = inference_free(workshop, tmp_path)
    folder = exported(checkpoint, "opensearch", tmp_path)
    (graph,) = folder.glob("*.onnx")
    structure = ModelFile.open(graph).structure
    assert [info.name for info in structure.inputs] == ["input1.input_ids", "input1.attention_mask"]
    assert [info.name for info in structure.outputs] == ["sparse"]
    for name, function, config, files in (
        ("checkpoint", "SPARSE_ENCODING", "ml-commons_model_config.json", {graph.name, "tokenizer.json"}),
        ("checkpoint-tokenizer", "SPARSE_TOKENIZE", "ml-commons_tokenizer_config.json", {"idf.json", "tokenizer.json"}),
    ):
        request, archive = json.loads((folder / config).read_text()), folder / f"{name}.zip"
        assert (request["name"], request["function_name"], request["model_format"]) == (name, function, "ONNX")
        assert request["model_content_hash_value"] == hashlib.sha256(archive.read_bytes()).hexdigest()
        assert request["model_content_size_in_bytes"] == archive.stat().st_size
        with zipfile.ZipFile(archive) as opened:
            assert set(opened.namelist()) == files
            assert opened.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (tokenizer.truncation or {}).get("max_length") == 128
    tokenizer.no_padding()
    ids = tokenizer.encode("the weather in the unbelievably lovely city").ids
    weights = load_file(checkpoint / "query_0_SparseStaticEmbedding" / "model.safetensors")["weight"]
    # SparseTokenizerModel of ml-commons: the text of each token, and 1 for one that is not in the table.
    table = json.loads((folder / "idf.json").read_text())
    texts = {token: tokenizer.decode([token], skip_special_tokens=True) for token in ids}
    assert {token: table.get(text, 1.0) for token, text in texts.items() if text} == {
        token: weights[token] for token in ids[1:-1]
    }
    # IfSplade of fastembed: the vocabulary's own name of each token.
    usage = usage_for(TARGETS["fastembed"], "sparse-encoding", (SpladePooling("max", "log1p_relu"),), looks_up=True)
    specification("fastembed", checkpoint, AutoTokenizer.from_pretrained(folder), usage).files(folder, 128)
    table = json.loads((folder / "idf.json").read_text())
    assert [table[tokenizer.id_to_token(token)] for token in ids] == weights[ids].tolist()
    assert list(table) == [tokenizer.id_to_token(token) for token in range(len(table))]  # the same file each time


def test_archives_are_the_same_whenever_they_are_written(workshop: Workshop, tmp_path: Path) -> None:
    """A hash that changes with the clock would register a model twice; token types are fed to some alone."""
    checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "checkpoint"))
    with pytest.raises(TargetError, match="does not say how it pools, and OpenSearch gets vectors from the graph"):
        exported(checkpoint, "opensearch", tmp_path)
    for name in M3_FILES:  # whose library pools by the first token, and consumers by what no file says
        (checkpoint / name).touch()
    with pytest.raises(TargetError, match=r"has no modules\.json, by which fastembed would know that an M3 embedder"):
        exported(checkpoint, "fastembed", tmp_path)
    for name in M3_FILES:
        (checkpoint / name).unlink()
    write_modules(checkpoint, ("Pooling", {"embedding_dimension": 32, "pooling_mode": "max"}))
    folder = exported(checkpoint, "opensearch", tmp_path)
    archive, config = folder / "checkpoint.zip", folder / "ml-commons_model_config.json"
    before, request = archive.read_bytes(), json.loads(config.read_text())
    assert request["model_config"] == {
        "model_type": "bert",
        "embedding_dimension": 32,
        "framework_type": "sentence_transformers",
        "pooling_mode": "CLS",
        "normalize_result": False,
    }
    specification("opensearch", checkpoint).pack(folder, folder / "checkpoint.onnx")
    assert archive.read_bytes() == before


def test_two_tokens_of_one_text_are_refused_where_queries_go_by_text(tmp_path: Path) -> None:
    """Byte-level tokenizers have such: parts of a character."""
    from tokenizers import decoders, models

    tokenizer = Tokenizer(models.BPE({"¡": 0, "¢": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert weights_by_text(np.array([2, 2], np.float32), wrapped)
    with pytest.raises(TargetError, match="weighs tokens of queries by their text"):
        weights_by_text(np.array([1, 2], np.float32), wrapped)


def test_the_backend_of_an_older_version_finds_every_module(tmp_path: Path) -> None:
    """sentence-transformers 6 saves Normalize by a name that 5.7 does not have, as transformers 5 does a tokenizer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    base = load_script("make_models").make_model("tiny-encoder", tmp_path)
    modules = [Transformer(str(base)), Pooling(32, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "saved"))
    saved = (tmp_path / "saved" / "modules.json").read_text()
    path = tmp_path / "saved" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "TokenizersBackend"}))
    folder = exported(tmp_path / "saved", "optimum", tmp_path)
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    listed = json.loads((folder / "modules.json").read_text())
    names = ["Transformer", "Pooling", "Normalize"]
    assert [one["type"] for one in listed] == [f"sentence_transformers.models.{name}" for name in names]
    assert "base.modules.normalize" in saved


def test_a_length_left_by_a_call_of_the_tokenizer_cuts_no_texts(workshop: Workshop, tmp_path: Path) -> None:
    """Fastembed takes the smaller of `max_length`, which transformers leaves behind, and `model_max_length`."""
    checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "checkpoint"))
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_length": 16}))
    settings = json.loads((exported(checkpoint, "fastembed", tmp_path) / "tokenizer_config.json").read_text())
    assert "max_length" not in settings
    assert settings["model_max_length"] == 64


@pytest.mark.parametrize(
    ("metadata", "other"),
    [
        ({}, ""),
        ({"query_token_id": "[unused5]"}, "'[unused5] ' before each query, not token 1"),
        ({"query_maxlen": 20}, "the query expansion QueryExpansion(length=20"),
        ({"attend_to_mask_tokens": True}, "the query expansion QueryExpansion(length=32, is_exact=True, attend=True"),
        ({"mask_punctuation": False}, "another skip list than punctuation in documents"),
    ],
)
def test_fastembed_has_one_kind_of_late_interaction(
    minilm: Path, tmp_path: Path, metadata: dict[str, Any], other: str
) -> None:
    """That of colbertv2.0, whose tokens and lengths are written in its code; any other setting is refused by name."""
    (tmp_path / "config.json").write_text('{"architectures": ["HF_ColBERT"], "model_type": "bert"}')
    (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    usage = usage_for(TARGETS["fastembed"], "late-interaction")
    fastembed = specification("fastembed", tmp_path, AutoTokenizer.from_pretrained(minilm), usage)
    assert usage.inputs(("input_ids", "token_type_ids", "attention_mask")) == ("input_ids", "attention_mask")
    found = list(other_than_colbert(fastembed.source, fastembed.tokenizer))
    assert [text[: len(other)] for text in found] == ([other] if other else [])
    if other:
        with pytest.raises(TargetError, match="fastembed's late interaction is fixed to colbert-ir/colbertv2.0"):
            fastembed.accepts()
    else:
        fastembed.accepts()


def test_infinity_is_told_how_long_texts_are_and_gets_no_rerankers_with_token_types(
    workshop: Workshop, tmp_path: Path
) -> None:
    """It cuts texts to the number of positions, and feeds pairs without saying which of their tokens is of which."""
    with pytest.raises(TargetError, match="feeds a reranker no token types, and .* has 2 of them"):
        exported(workshop.checkpoint("tiny-reranker"), "infinity", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512, "model_type": "bert"}')
    encoder = workshop.checkpoint("tiny-encoder")
    infinity = specification("infinity", encoder, AutoTokenizer.from_pretrained(encoder))
    infinity.files(tmp_path, 256)
    assert json.loads((tmp_path / "config.json").read_text()) == {"max_position_embeddings": 256, "model_type": "bert"}
    assert "it scales vectors to length 1" in infinity.note


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head": "splade"}, "sparse encoders by their logits, and computes the rest itself; --head splade was passed"),
        ({"head": "embedding"}, "takes sparse encoders by their logits, .*; --head embedding was passed"),
        ({"head": "splade", "target": "tei"}, "takes text encoders, text classifiers; this model's task is sparse-enc"),
        ({"head": "logits", "target": "anserini"}, "takes sparse encoders with the head splade; --head logits"),
        ({"keep_raw": True}, "decides on what the graph gives, and --keep_raw was passed"),
        ({"dimensions": 4, "keep_raw": True}, "--keep_raw and --dimensions was passed"),
    ],
)
def test_what_contradicts_a_target_is_refused(
    workshop: Workshop, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    """By name, and with what the target takes."""
    model = str(workshop.checkpoint("tiny-splade"))
    with pytest.raises(TargetError, match=reason):
        export_model(ExportOptions(model, **{"target": "vespa", "output": tmp_path / "m", **options}))
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("target", "head", "task", "outputs"),
    [
        ("anserini", "splade", "auto", ["output_idx", "output_weights"]),
        ("anserini", "splade", "sparse-encoding", ["output_idx", "output_weights"]),
        ("anserini", "splade", "fill-mask", ["output_idx", "output_weights"]),
        ("anserini", "auto", "sparse-encoding", ["output_idx", "output_weights"]),
        ("vespa", "logits", "sparse-encoding", ["logits"]),
        ("vespa", "none", "auto", ["logits"]),
    ],
)
def test_the_head_that_a_target_needs_may_be_named(
    workshop: Workshop, tmp_path: Path, target: str, head: str, task: str, outputs: list[str]
) -> None:
    """By its name, by the task that means it, or by both."""
    model = str(workshop.checkpoint("tiny-splade"))
    options = ExportOptions(model, target=target, head=head, task=task, output=tmp_path / "m")
    planned = prepare(Request.of(options)).plan.specification
    assert planned is not None
    assert [info.name for info in planned.usage.outputs] == outputs


def test_every_target_is_checked_against_its_consumer() -> None:
    """By `verify --consumer`, or by what its source does where it cannot be called from here."""
    script = load_script("check_consumers")
    assert set(script.CHECKS) == set(TARGETS) - {"plain"}
    for name in script.CHECKS:
        sourced = (script.CONSUMERS / f"sourced_{name.replace('-', '_')}.py").is_file()
        assert sourced == (not TARGETS[name].runner) == (not TARGETS[name].install)


def test_a_row_and_its_module_belong_together() -> None:
    """Each module in `targets/` is named by one row, and only the target that reads no folder is without a graph."""
    modules = {info.name for info in pkgutil.iter_modules(targets.__path__)}
    assert sorted(row.module for row in TARGETS.values() if row.module) == sorted(modules)
    for row in TARGETS.values():
        assert class_of(row).__module__ == f"{targets.__name__}.{row.module}" if row.module else TargetSpecification
        assert row.takes_any_graph == (not row.graph) == (row.name == "plain")
        assert {row.length_in} <= {"", *row.files}
        assert {name for usage in row.usages for name in usage.after or ()} <= set(COMPUTED)
