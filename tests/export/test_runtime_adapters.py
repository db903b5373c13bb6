"""Adapters beside their base, compared with PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from numpy.typing import NDArray

from onnxtool import CorpusOptions, ExportOptions, OptimizeOptions, encode_corpus, export_model, load, optimize_model
from onnxtool.errors import CheckpointError, InputError, ModelFileError, OnnxtoolError, OptionError, OutputExistsError
from onnxtool.model_file import ModelFile
from onnxtool.runtime.session import open_session
from tests.infer.tiny_models import write_checkpoint

# Of PEFT, about transformers, bases in folders, and patterns that fit no layer.
pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = ["a cat", "the dog sat on a mat", "cat"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
KINDS: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "BERT": ("Bert", SMALL, ["query", "value"], ["query", "output.dense"]),
    "Qwen3": (
        "Qwen3",
        SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8},
        ["q_proj", "v_proj"],
        ["k_proj", "down_proj"],
    ),
    "GPT-2": ("GPT2", {"n_embd": 16, "n_layer": 1, "n_head": 2}, ["c_attn"], ["c_attn", "c_proj"]),
}
MORE: dict[str, Any] = {"use_rslora": True, "rank_pattern": {"query": 2, "k_proj": 2}, "alpha_pattern": {"value": 9}}


def model_of(kind: str) -> Any:
    name, sizes, *_ = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}Model")(
        config(vocab_size=40, pad_token_id=0, bos_token_id=2, eos_token_id=3, max_position_embeddings=64, **sizes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


def save_adapter(base: Path, folder: Path, config: Any) -> Path:
    """Save an adapter with random values as PEFT does."""
    torch.manual_seed(len(folder.name))
    adapted = peft.get_peft_model(transformers.AutoModel.from_pretrained(base), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad or "lora_B" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return folder


def change(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def make(folder: Path, kind: str) -> tuple[Path, Path, Path]:
    """Write a checkpoint that pools, and two adapters of it."""
    base, model = folder / "base", model_of(kind)
    model.save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    pooling = {"word_embedding_dimension": 16, "pooling_mode_lasttoken": True}
    write_checkpoint(base, config=config, modules={"Transformer": {}, "Pooling": pooling})
    first, second = (
        save_adapter(base, folder / name, peft.LoraConfig(r=rank, target_modules=targets, **more))
        for name, rank, targets, more in (("legal", 3, KINDS[kind][2], {}), ("medical", 4, KINDS[kind][3], MORE))
    )
    return base, first, second


def vector(base: Path, adapter: Path | None, text: str) -> NDArray[Any]:
    """Return the last token's state by PEFT."""
    model = transformers.AutoModel.from_pretrained(base)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    tokens = transformers.AutoTokenizer.from_pretrained(base)(text, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    with torch.no_grad():
        found: NDArray[Any] = model.eval()(**tokens)[0][0, -1].numpy()
    return found


def require_equal(file: Path, base: Path, adapters: tuple[Path, ...], atol: float) -> None:
    """Compare the file with PEFT, with each adapter and without one."""
    without = np.stack([vector(base, None, text) for text in TEXTS])
    for path in (None, *adapters):
        expected = np.stack([vector(base, path, text) for text in TEXTS])
        assert path is None or abs(expected - without).max() > 0.1
        found: Any = load(file, adapter=None if path is None else path.name, provider="cpu").encode(TEXTS)
        np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    """A checkpoint, two adapters, and their export, which must not be changed."""
    folder = tmp_path_factory.mktemp("adapters")
    base, first, second = make(folder, "BERT")
    export_model(ExportOptions(base, output=folder / "m.onnx", adapters=[first, second]))
    return base, first, second, folder / "m.onnx"


def test_a_bert_computes_what_peft_does(bert: tuple[Path, Path, Path, Path]) -> None:
    """Ranks, factors and layers differ, and the base is as exact as without adapters."""
    base, first, second, file = bert
    require_equal(file, base, (first, second), 1e-5)


@pytest.mark.parametrize(("kind", "exporter"), [("Qwen3", "dynamo"), ("GPT-2", "torchscript")])
def test_a_decoder_computes_what_peft_does(tmp_path: Path, kind: str, exporter: str) -> None:
    """By either exporter, and with weights that are transposed (Conv1D)."""
    base, *adapters = make(tmp_path, kind)
    export_model(ExportOptions(base, output=tmp_path / "m.onnx", adapters=adapters, exporter=exporter))
    require_equal(tmp_path / "m.onnx", base, tuple(adapters), 1e-5)


@pytest.mark.parametrize(("precision", "atol"), [("fp32", 1e-5), ("fp16", 0.03), ("int8", 0.3)])
def test_an_optimized_file_takes_the_same_adapters(
    bert: tuple[Path, Path, Path, Path], tmp_path: Path, precision: str, atol: float
) -> None:
    """They are copied to the folder of the output, and each was compared."""
    base, first, second, file = bert
    report = optimize_model(OptimizeOptions(file, output=tmp_path / "m.onnx", precision=precision, timing=False))
    assert sum(note.startswith("with the adapter") for note in report.notes) == 2
    shutil.copytree(file.with_suffix(""), tmp_path / "m")
    require_equal(tmp_path / "m.onnx", base, (first, second), atol)


def test_a_cut_vocabulary_takes_the_same_adapters(bert: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    """The file is cut in a folder of its own, where no adapter lies."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    optimize_model(
        OptimizeOptions(bert[3], output=tmp_path / "m.onnx", vocabulary=tmp_path / "texts.txt", timing=False)
    )
    for name in (None, "legal"):
        expected: Any = load(bert[3], adapter=name, provider="cpu").encode(TEXTS)
        found: Any = load(tmp_path / "m.onnx", adapter=name, provider="cpu").encode(TEXTS)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_runs_that_go_on_from_another_use_the_adapter(bert: tuple[Path, Path, Path, Path]) -> None:
    """By onnxruntime, the adapters of such a run are ignored, with no more than a warning."""
    session = open_session(ModelFile.open(bert[3]).with_adapter("legal"), provider="cpu")
    feeds = {name: np.ones((1, 3), np.int64) for name in session.input_names}
    (expected,) = session.run(feeds).values()
    np.testing.assert_array_equal(session.step(session.cached({}), feeds)[session.output_names[0]].numpy(), expected)
    assert abs(open_session(bert[3], provider="cpu").run(feeds)[session.output_names[0]] - expected).max() > 0.1


def test_adapters_share_the_memory_of_one_session(bert: tuple[Path, Path, Path, Path]) -> None:
    """Each gives what a model loaded with it gives, and the base comes back."""
    base = load(bert[3], provider="cpu")
    for name in ("legal", "medical", None):
        model = base.with_adapter(name)
        expected: Any = load(bert[3], adapter=name, provider="cpu").encode(TEXTS)
        np.testing.assert_array_equal(model.encode(TEXTS), expected)
        np.testing.assert_array_equal(model.with_adapter(None).encode(TEXTS), base.encode(TEXTS))
        assert model.session._inference is base.session._inference


def test_a_changed_adapter_is_refused(bert: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    """As is a missing one; the base runs without them."""
    for path in bert[3].parent.glob("m.*"):
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "m.medical.onnx_adapter").replace(tmp_path / "m.legal.onnx_adapter")
    shutil.copytree(bert[3].with_suffix(""), tmp_path / "m")
    with pytest.raises(ModelFileError, match="legal.onnx_adapter is another file"):
        load(tmp_path / "m.onnx", adapter="legal")
    with pytest.raises(ModelFileError, match="medical.onnx_adapter is missing"):
        load(tmp_path / "m.onnx", adapter="medical")
    with pytest.raises(InputError, match="has no adapter 'tax'; it has legal, medical"):
        load(tmp_path / "m.onnx", adapter="tax")
    assert load(tmp_path / "m.onnx").encode("a cat").shape == (16,)


def test_a_corpus_of_an_adapter_is_not_that_of_the_base(bert: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    """Vectors of both cannot end up in one folder."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = CorpusOptions(adapter="legal", provider="cpu")
    report = encode_corpus(bert[3], tmp_path / "texts.txt", tmp_path / "out", options)
    assert any("with the adapter in" in note and "legal" in note for note in report.notes)
    assert any("legal" in note for note in load(bert[3], adapter="legal", provider="cpu").answer("a cat").notes)
    found = np.load(next((tmp_path / "out").glob("*.npy")))
    expected: Any = load(bert[3], adapter="legal", provider="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with pytest.raises(OutputExistsError, match="adapter"):
        encode_corpus(bert[3], tmp_path / "texts.txt", tmp_path / "out", CorpusOptions(provider="cpu"))


LORA: dict[str, Any] = {"r": 2, "target_modules": ["query"]}
REFUSED: dict[str, tuple[Any, str]] = {
    "DoRA": (peft.LoraConfig(**LORA, use_dora=True), "lora_magnitude_vector"),
    "biases": (peft.LoraConfig(**LORA, bias="lora_only"), "query.base_layer.bias|query.bias"),
    "a bias of B": (peft.LoraConfig(**LORA, lora_bias=True), "lora_B.default.bias"),
    "layers of its own": (peft.LoraConfig(**LORA, modules_to_save=["pooler"]), "pooler.modules_to_save"),
    "embeddings": (peft.LoraConfig(r=2, target_modules=["word_embeddings"]), "lora_embedding_A"),
    "tokens": (peft.LoraConfig(**LORA, trainable_token_indices=[1, 2]), "trainable_tokens"),
    "layers twice": (peft.LoraConfig(**LORA, layer_replication=[[0, 1], [0, 2]]), "more than linear layers"),
    "another kind": (peft.IA3Config(target_modules=["query"], feedforward_modules=[]), "kind IA3"),
    "a prompt": (peft.LoraConfig(**LORA), "the settings alora_invocation_tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_changes_more_is_refused_by_name(
    bert: tuple[Path, Path, Path, Path], tmp_path: Path, what: str
) -> None:
    """With the way out: merged, it is a model like any other."""
    config, match = REFUSED[what]
    folder = save_adapter(bert[0], tmp_path / "odd", config)
    change(folder, **({"alora_invocation_tokens": [3]} if what == "a prompt" else {}))
    with pytest.raises(CheckpointError, match=match) as refusal:
        export_model(ExportOptions(bert[0], output=tmp_path / "m.onnx", adapters=[folder]))
    assert "merged" in refusal.value.hint
    assert not (tmp_path / "m.onnx").exists()


def test_an_adapter_of_another_base_is_refused(bert: tuple[Path, Path, Path, Path], tmp_path: Path) -> None:
    """By its weights where it is here; a copy of the base is the same, and a folder of this name elsewhere passes."""
    base, first, *_ = bert
    folder, other = tmp_path / "odd", tmp_path / "other"
    shutil.copytree(first, folder)
    shutil.copytree(base, other)

    def export() -> None:
        export_model(
            ExportOptions(
                base, output=tmp_path / "m.onnx", adapters=[folder], exporter="torchscript", verify=False, force=True
            )
        )

    stated: str | None
    for stated in (str(other), "/gone/base", "someone/base"):
        change(folder, base_model_name_or_path=stated)
        export()
    transformers.BertModel(transformers.BertConfig(vocab_size=40, **SMALL)).save_pretrained(other)
    for stated, match in ((str(other), "is for .*other, not for"), ("a/b", "is for a/b, not for"), (None, "not name")):
        change(folder, base_model_name_or_path=stated)
        with pytest.raises(CheckpointError, match=match):
            export()


def test_an_adapter_of_the_checkpoints_own_code_is_refused_by_name(
    bert: tuple[Path, Path, Path, Path], tmp_path: Path
) -> None:
    """As of jina-embeddings-v3, whose config.json lists them."""
    base = Path(shutil.copytree(bert[0], tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"lora_adaptations": ["retrieval.query"]}))
    with pytest.raises(CheckpointError, match="retrieval.query is an adapter in the format of .*base's own code"):
        export_model(ExportOptions(base, output=tmp_path / "m.onnx", adapters=["retrieval.query"]))


@pytest.mark.parametrize(
    ("adapters", "options", "error", "match"),
    [
        (["legal", "copy/legal"], {}, OnnxtoolError, "named legal, as is another one"),
        (["base"], {}, CheckpointError, "has no adapter_config.json"),
        (["legal"], {"target": "fastembed"}, OptionError, "nothing would feed with --target"),
        (["legal"], {"sizes": ["1x8"]}, OptionError, "nothing would feed with --sizes"),
    ],
)
def test_what_cannot_go_together_is_refused(
    bert: tuple[Path, Path, Path, Path], tmp_path: Path, adapters: list[str], options: Any, error: Any, match: str
) -> None:
    """Before anything is traced."""
    shutil.copytree(bert[1], tmp_path / "copy" / "legal")
    output = tmp_path / ("m" if "target" in options else "m.onnx")
    folders = [(tmp_path if name.startswith("copy") else bert[0].parent) / name for name in adapters]
    with pytest.raises(error, match=match):
        export_model(ExportOptions(bert[0], output=output, adapters=folders, **options))
