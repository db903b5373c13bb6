"""The files that a target reads beside the graph, where the checkpoint's own are not what it takes."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.checkpoint.sentence_modules import POOLING_FLAGS
from onnxtool.errors import TargetError
from onnxtool.export.companions import is_wordpiece, wordpiece_vocabulary
from onnxtool.export.heads.steps import Normalize, Pool
from onnxtool.export.targets.table import DENSE, SPARSE, Target
from onnxtool.reports import Json

if TYPE_CHECKING:
    from onnxtool.export.targets.contracts import Contract

# Anserini looks tokens up by name in vocab.txt and drops these ids by number.
_ANSERINI_IDS = {"[PAD]": 0, "[CLS]": 101, "[SEP]": 102}
_PLAIN_TARGET = "pass --target plain"
# What text-embeddings-inference reads of config.json, and the names that it knows for each.
_TEI_KEYS = {
    "architectures": ("architectures",),
    "model_type": ("model_type",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
}
_FASTEMBED_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST_TOKEN"}
_TEI_MODES = ("cls", "mean", "lasttoken")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_UNLIMITED = 2**31  # transformers writes "no limit" as 1e30, which fastembed refuses


def check_tokenizer(target: Target, tokenizer: Any) -> None:
    """Refuse a tokenizer that the target cannot run.

    Raises:
        TargetError: it is of a kind, or has a setting, that the target does not have.
    """
    if target.name == "anserini":
        _check_wordpiece(tokenizer)
    elif getattr(tokenizer, "backend_tokenizer", None) is None:
        raise TargetError(
            f"{target.title} reads tokenizer.json, which {type(tokenizer).__name__} cannot be written as",
            "a newer transformers or tokenizers may convert it; else pass --target plain",
        )
    if target.name == "fastembed" and getattr(tokenizer, "pad_token", None) is None:
        raise TargetError(
            "fastembed pads every batch, and this tokenizer has no padding token",
            "set one with tokenizer.pad_token = tokenizer.eos_token, save the tokenizer, and export again",
        )


def write_target_files(contract: Contract, config: Any, tokenizer: Any, folder: Path, max_length: int | None) -> None:
    """Write what the target reads into `folder`, in which the companions of the checkpoint lie already.

    Args:
        contract: for which target and model.
        config: the PretrainedConfig.
        tokenizer: the checkpoint's.
        folder: where the companions are.
        max_length: the most tokens that a text may have; None where the model does not bound it.

    Raises:
        TargetError: a setting that the target needs is not there.
    """
    _complete_tokenizer(contract, tokenizer, folder)
    max_length = min((limit for limit in (contract.max_tokens, max_length) if limit), default=None)
    match contract.target.name:
        case "anserini":
            vocabulary = wordpiece_vocabulary(tokenizer, contract.vocabulary_size)
            (folder / f"{contract.name}-vocab.txt").write_text(vocabulary, encoding="utf-8")
        case "fastembed":
            _bound_texts(folder, max_length, pad_token=str(tokenizer.pad_token))
            if "model_max_length" not in _read_json(folder / _TOKENIZER_CONFIG):
                raise TargetError(
                    "fastembed needs the length that texts are cut to, and neither tokenizer nor model says it",
                    "write model_max_length into tokenizer_config.json of the checkpoint",
                )
        case "transformers.js":
            _bound_texts(folder, max_length)
        case "vespa":
            _truncate(folder, max_length)
        case "tei":
            _write_tei_config(folder, config)
            _write_tei_pooling(contract, folder)


def instructions(contract: Contract | None) -> tuple[str, ...]:
    """Say what the users of a target must tell it about this model; empty where it reads all of it from the folder."""
    said = "" if contract is None else _instruction(contract)
    return (said,) if said else ()


def _instruction(contract: Contract) -> str:
    sparse, in_graph = contract.use.kind == SPARSE, contract.head is not None
    steps = () if in_graph else contract.steps
    mode = next((step.modes[0] for step in steps if isinstance(step, Pool)), "")
    normalizes = any(isinstance(step, Normalize) for step in steps)
    match contract.target.name:
        case "anserini":
            return (
                "Anserini looks for graph and vocabulary in ~/.cache/pyserini/encoders; "
                f"{contract.name}-batched.onnx takes many texts, and its output_text says which of them a term is of"
            )
        case "fastembed" if sparse:
            return 'load it with SparseTextEmbedding("prithivida/Splade_PP_en_v1", specific_model_path=FOLDER)'
        case "fastembed" if contract.use.kind == DENSE:
            pooling = "DISABLED" if in_graph else _FASTEMBED_MODES.get(mode, "MEAN")
            return (
                f"register it with TextEmbedding.add_custom_model(..., pooling=PoolingType.{pooling}, "
                f'normalization={normalizes}, model_file="model.onnx"); load it with specific_model_path=FOLDER'
            )
        case "vespa" if sparse:
            return "services.xml: a component of type splade-embedder"
        case "vespa":
            settings = [f"<pooling-strategy>{'none' if in_graph else mode or 'mean'}</pooling-strategy>"]
            settings += ["<transformer-output>sentence_embedding</transformer-output>"] if in_graph else []
            settings += ["<normalize>true</normalize>"] if normalizes else []
            return f"services.xml: a component of type hugging-face-embedder with {''.join(settings)}"
        case "tei" if contract.use.kind == DENSE and mode not in _TEI_MODES:
            why = "it asks for one, and the graph has pooled already" if in_graph else "the checkpoint names no pooling"
            return f"start text-embeddings-router with --pooling mean: {why}"
    return ""


def _check_wordpiece(tokenizer: Any) -> None:
    if not is_wordpiece(tokenizer):
        raise TargetError(
            f"Anserini tokenizes with a WordPiece vocabulary; {type(tokenizer).__name__} is none",
            "only BERT's kin can be used there; --target sentence-transformers, fastembed or vespa take this model",
        )
    for token, token_id in _ANSERINI_IDS.items():
        found = tokenizer.get_vocab().get(token)
        if found != token_id:
            raise TargetError(
                f"Anserini takes token {token_id} for {token} and drops it from every text; "
                f"in this vocabulary {token} is {'missing' if found is None else f'token {found}'}",
                _PLAIN_TARGET,
            )
    if tokenizer.tokenize("Anserini") != tokenizer.tokenize("anserini"):
        raise TargetError(
            "Anserini lower-cases every text, and this tokenizer tells cases apart",
            "use an uncased model, or --target plain",
        )


def _complete_tokenizer(contract: Contract, tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer's files that the target needs and the checkpoint lacks."""
    names = [name for name in contract.files if "token" in name and not (folder / name).is_file()]
    if not names:
        return
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        for name in names:
            written = Path(scratch) / name
            if written.is_file():
                shutil.copyfile(written, folder / name)
            elif name == "special_tokens_map.json":  # transformers 5 keeps them in tokenizer_config.json
                _write_json(folder / name, dict(tokenizer.special_tokens_map))


def _bound_texts(folder: Path, max_length: int | None, *, pad_token: str = "") -> None:
    """State in tokenizer_config.json the longest text, and the padding token: all that some consumers read of them."""
    path = folder / _TOKENIZER_CONFIG
    config = _read_json(path)
    stated = config.pop("model_max_length", None)
    is_bound = isinstance(stated, int) and not isinstance(stated, bool) and 0 < stated < _UNLIMITED
    limits = [limit for limit in (stated if is_bound else None, max_length) if isinstance(limit, int)]
    changed = {**config, **({"model_max_length": min(limits)} if limits else {})}
    if pad_token and not config.get("pad_token"):
        changed["pad_token"] = pad_token
    if changed != {**config, **({} if stated is None else {"model_max_length": stated})}:
        _write_json(path, changed)


def _truncate(folder: Path, max_length: int | None) -> None:
    """State in tokenizer.json how long a text may be: Vespa follows it, and what the last training left there with it.

    all-MiniLM-L6-v2, for one, says 128 there and takes 256.
    """
    path = folder / "tokenizer.json"
    content = _read_json(path)
    if max_length is None or not isinstance(content.get("truncation"), dict):
        return  # Vespa's own setting, transformer-max-tokens, decides then
    truncation: Json = {"direction": "Right", "max_length": max_length, "strategy": "LongestFirst", "stride": 0}
    if content["truncation"] != truncation:
        _write_json(path, {**content, "truncation": truncation})


def _write_tei_config(folder: Path, config: Any) -> None:
    """Add what text-embeddings-inference reads of config.json under names that the architecture does not use."""
    path = folder / "config.json"
    content = _read_json(path)
    missing = [key for key, names in _TEI_KEYS.items() if not any(name in content for name in names)]
    changes = {key: getattr(config, key, None) for key in missing}
    unknown = [key for key, value in changes.items() if value is None]
    if unknown:
        raise TargetError(
            f"text-embeddings-inference needs {', '.join(unknown)} in config.json, which this model does not have",
            "serve it from Python, or pass --target plain",
        )
    if changes:
        _write_json(path, {**content, **changes})


def _write_tei_pooling(contract: Contract, folder: Path) -> None:
    """Write 1_Pooling/config.json with the flags of old, which are all that text-embeddings-inference reads."""
    modes = next((step.modes for step in contract.steps if isinstance(step, Pool)), ())
    if contract.head is not None or len(modes) != 1:
        return
    path = folder / "1_Pooling" / "config.json"
    content = _read_json(path) if path.is_file() else {}
    flags = {flag: mode == modes[0] for mode, flag in POOLING_FLAGS.items()}
    if any(content.get(flag) is not value for flag, value in flags.items()):
        path.parent.mkdir(exist_ok=True)
        _write_json(path, {**content, **flags})


def _read_json(path: Path) -> dict[str, Json]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.unlink(missing_ok=True)  # never through a link into the checkpoint
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
