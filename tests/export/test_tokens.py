"""What reads texts by the files of an export makes the tokens of transformers, or there is no export."""
# ruff: noqa: S105, S106  tokens are no passwords

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from onnxtool import ExportOptions, export_model
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.checkpoint.tokenizer_library import read_file
from onnxtool.errors import CheckpointError, InputError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.run import _tokenizer_notes
from onnxtool.export.sidecar_files import write_sidecar_files
from onnxtool.export.source import Source
from onnxtool.export.target_specification import class_of
from onnxtool.export.targets import TARGETS
from onnxtool.infer import load
from onnxtool.model_file import ModelFile
from onnxtool.runtime import tokens
from onnxtool.runtime.tokens import HARD_TEXTS, OwnTokenizer, hard_texts, read_folder
from tests.workshop import WORDS, Workshop, cut_vocabulary, trained_model

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "config.json")
Change = Callable[[Path], object]


def edited(name: str, **values: Any) -> Change:
    """Return a change of top-level values of a JSON file, which may not be there yet."""

    def change(folder: Path) -> None:
        before = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps({**before, **values}))

    return change


def config(**values: Any) -> Change:
    return edited("tokenizer_config.json", **values)


def model(**values: Any) -> Change:
    """Return a change of the model in tokenizer.json."""

    def change(folder: Path) -> None:
        stored = json.loads((folder / "tokenizer.json").read_text())["model"]
        edited("tokenizer.json", model={**stored, **values})(folder)

    return change


def without(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def all_of(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def added(token: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": token, **plain, **flags}


LOWER = edited("sentence_bert_config.json", max_seq_length=128, do_lower_case=True)
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
# Lies of MiniLM's tokenizer about itself, and what transformers ignores.
CHANGES: Mapping[str, Change] = {
    "cased": config(do_lower_case=False),
    "accents stay": config(strip_accents=False),
    "cased without accents": config(do_lower_case=False, strip_accents=True),
    "no Chinese": config(tokenize_chinese_chars=False),
    "RoBERTa's class": config(tokenizer_class="RobertaTokenizer"),
    "GPT-2's class": config(tokenizer_class="GPT2Tokenizer"),
    "MPNet's class": config(tokenizer_class="MPNetTokenizer"),
    "no class of its own": config(tokenizer_class="PreTrainedTokenizerFast"),
    "an unknown class": config(tokenizer_class="FooTokenizer"),
    "ELECTRA's class": config(tokenizer_class="ElectraTokenizer"),
    "added tokens": edited("added_tokens.json", **{"[ENT]": WORDS, "covid-19": WORDS + 1}),
    "a token added by id": config(added_tokens_decoder={str(WORDS): added("foobar", normalized=True)}),
    "more special tokens": config(additional_special_tokens=["<ent>", "hello"]),
    "special tokens by the map": edited("special_tokens_map.json", additional_special_tokens=["the"]),
    "another mask by the map": edited("special_tokens_map.json", mask_token="<mask>"),
    "another mask by the settings": all_of(without("special_tokens_map.json"), config(mask_token="<mask>")),
    "another normalizer": edited("tokenizer.json", normalizer={"type": "Lowercase"}),
    "no normalizer": edited("tokenizer.json", normalizer=None),
    "a cased normalizer": edited("tokenizer.json", normalizer={**BERT, "lowercase": False}),
    "another pre-tokenizer": edited("tokenizer.json", pre_tokenizer={"type": "WhitespaceSplit"}),
    "no post-processor": edited("tokenizer.json", post_processor=None),
    "shorter words": model(max_input_chars_per_word=10),
    "another prefix of pieces": model(continuing_subword_prefix="@@"),
    "no settings": without("tokenizer_config.json", "special_tokens_map.json"),
    "no tokenizer.json": all_of(without("tokenizer.json"), config(do_lower_case=False)),
    "roles exchanged": all_of(without("special_tokens_map.json"), config(cls_token="[SEP]", sep_token="[CLS]")),
    "tokens around a text": config(bos_token="<s>", eos_token="</s>", add_bos_token=True),
    "the left side": config(truncation_side="left", padding_side="left"),
    "what no class reads": config(do_basic_tokenize=False, never_split=["hello"], add_prefix_space=True),
    "a stale vocab.txt": lambda folder: (folder / "vocab.txt").write_text("[PAD]\nhello\n"),
    "lower-cased by sentence-transformers": all_of(config(do_lower_case=False), LOWER),
}


def minilm(folder: Path, change: Change = lambda _folder: None) -> Path:
    """Copy MiniLM without its weights, with the first words of its vocabulary, and change the copy."""
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(trained_model() / name, folder / name)
    cut_vocabulary(folder, WORDS)
    (folder / "model.safetensors").touch()
    change(folder)
    return folder


@dataclass(frozen=True)
class Written:
    """The files that an export of a checkpoint would write, and its tokenizer."""

    folder: Path
    own: OwnTokenizer
    texts: list[Text]


def written(checkpoint: Path, *, task: str = "auto") -> Written:
    """Write them beside the checkpoint."""
    source = Source.find(str(checkpoint))
    tokenizer = Checkpoint.open(source, task=task).load_tokenizer()
    folder = checkpoint.parent / "written"
    write_sidecar_files(source, tokenizer, folder, folder)
    return Written(folder, OwnTokenizer(tokenizer, "the model"), hard_texts(tokenizer))


def ids_of_transformers(folder: Path, texts: list[str], *, lower: bool = False) -> list[list[int]]:
    """Return what a user of transformers gets; of lower case, where sentence-transformers makes it so before."""
    from transformers import AutoTokenizer

    read: list[list[int]] = AutoTokenizer.from_pretrained(folder)([t.lower() if lower else t for t in texts]).input_ids
    return read


@pytest.mark.parametrize("name", CHANGES)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """By tokenizer.json alone, by onnxtool, cut or not, and by transformers again from the new files."""
    folder = minilm(tmp_path / "model", CHANGES[name])
    found = written(folder)
    found.own.check("onnxtool", read_folder(CheckpointFolder(found.folder)), found.texts)
    lower = CHANGES[name] is CHANGES["lower-cased by sentence-transformers"]
    # Python's lower case of these is another one than that of Rust, or has no cased text around special tokens.
    texts = [text for text in found.texts if isinstance(text, str) and not (lower and {*"[Σ"} & {*text})]
    wanted = ids_of_transformers(folder, texts, lower=lower)
    assert read_file(found.folder / "tokenizer.json", texts, None) == wanted
    if not lower:
        assert ids_of_transformers(found.folder, texts) == wanted


def test_what_is_effective_stays_as_it_is(tmp_path: Path) -> None:
    """Byte for byte, so that its digest is the checkpoint's."""
    folder = minilm(tmp_path / "model")
    copy = written(folder).folder
    assert all((copy / name).read_bytes() == (folder / name).read_bytes() for name in FILES)


def test_the_comparison_sees_another_tokenizer(tmp_path: Path) -> None:
    """All that it can see: the file as it was before transformers' settings were written into it."""
    change = config(do_lower_case=False)
    found = written(minilm(tmp_path / "model", change))
    shutil.copyfile(tmp_path / "model" / "tokenizer.json", found.folder / "tokenizer.json")
    with pytest.raises(
        CheckpointError, match=r"onnxtool would read other tokens than BertTokenizer of the model: of 'H"
    ):
        found.own.check("onnxtool", read_folder(CheckpointFolder(found.folder)), found.texts)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (config(split_special_tokens=True), "tokenizer.json cannot say split_special_tokens"),
        (config(tokenizer_class="CanineTokenizer"), "CanineTokenizer runs in Python"),
        (config(tokenizer_class="ByT5Tokenizer"), "ByT5Tokenizer runs in Python"),
    ],
)
def test_what_a_tokenizer_json_cannot_say_is_an_error(tmp_path: Path, change: Change, hint: str) -> None:
    """With the way out."""
    found = written(minilm(tmp_path / "model", change))
    with pytest.raises(CheckpointError, match="would read other tokens") as caught:
        found.own.check("onnxtool", read_folder(CheckpointFolder(found.folder)), found.texts)
    assert hint in caught.value.hint


SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "[CLS]", "[SEP]"]


@cache
def tiny(kind: str) -> str:
    """Return a tokenizer.json of a few hundred tokens, trained on the hard texts."""
    trainer: Any
    if kind == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            unk_token="<unk>",
            show_progress=False,
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(HARD_TEXTS, trainer)
    return tokenizer.to_str()


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("BPE", "RobertaTokenizer", {"add_prefix_space": True}),
        ("BPE", "RobertaTokenizer", {"trim_offsets": False}),
        ("BPE", "GPT2Tokenizer", {"add_prefix_space": True, "model_input_names": ["input_ids"]}),
        ("BPE", "Qwen2Tokenizer", {"clean_up_tokenization_spaces": True}),
        ("BPE", "LlamaTokenizer", {"legacy": False, "add_bos_token": True}),
        ("BPE", "LlamaTokenizer", {"legacy": True, "add_eos_token": True}),
        ("BPE", "CLIPTokenizer", {}),
        ("BPE", "DebertaTokenizer", {"additional_special_tokens": ["hello"]}),
        ("BPE", "TokenizersBackend", {"chat_template": "{{ messages[0].content }}"}),
        ("BPE", "GemmaTokenizer", {}),
        ("Unigram", "XLMRobertaTokenizer", {}),
        ("Unigram", "T5Tokenizer", {"add_prefix_space": False}),
        ("Unigram", "T5Tokenizer", {"legacy": False}),
        ("Unigram", "AlbertTokenizer", {"do_lower_case": False, "keep_accents": True}),
        ("Unigram", "AlbertTokenizer", {"do_lower_case": True}),
        ("Unigram", "XLNetTokenizer", {}),
        ("Unigram", "DebertaV2Tokenizer", {"do_lower_case": True, "split_by_punct": True}),
    ],
)
def test_other_classes_make_their_own_tokens(tmp_path: Path, kind: str, name: str, settings: dict[str, Any]) -> None:
    """Each builds its rules anew from the vocabulary in tokenizer.json, and leaves those that the file has."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tiny(kind))
    config(tokenizer_class=name, unk_token="<unk>", **settings)(folder)
    edited("config.json", model_type="gpt_neo", architectures=["GPTNeoForCausalLM"])(folder)
    (folder / "model.safetensors").touch()
    found = written(folder, task="text-generation")
    found.own.check("onnxtool", read_folder(CheckpointFolder(found.folder)), found.texts)
    texts = [text for text in found.texts if isinstance(text, str)]
    assert read_file(found.folder / "tokenizer.json", texts, None) == ids_of_transformers(folder, texts)
    reads = TextTokenizer(CheckpointFolder(found.folder))
    assert reads.pads_left == (found.own.tokenizer.padding_side == "left")


def test_roles_are_those_of_transformers(tmp_path: Path) -> None:
    """A class names tokens that no file does, and the older file of special tokens comes before the settings."""
    bare = written(minilm(tmp_path / "bare" / "model", without("tokenizer_config.json", "special_tokens_map.json")))
    assert TextTokenizer(CheckpointFolder(bare.folder)).mask_token == "[MASK]"
    both = written(minilm(tmp_path / "both" / "model", config(unk_token="[MASK]")))
    assert TextTokenizer(CheckpointFolder(both.folder)).named_token("unk_token") == both.own.tokenizer.unk_token


def test_vocab_txt_has_the_tokens_of_tokenizer_json(tmp_path: Path) -> None:
    """One that another vocabulary left is replaced."""
    found = written(minilm(tmp_path / "model", lambda folder: (folder / "vocab.txt").write_text("[PAD]\nhello\n")))
    words = (trained_model() / "vocab.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    assert (found.folder / "vocab.txt").read_text(encoding="utf-8") == "".join(words[:WORDS])


@pytest.mark.parametrize(
    ("target", "change", "differs"),
    [
        ("anserini", config(do_basic_tokenize=True), False),
        ("anserini", config(strip_accents=False), True),
        ("anserini", edited("added_tokens.json", **{"covid-19": WORDS}), True),
        ("anserini", config(truncation_side="left"), True),
        ("fastembed", config(do_lower_case=False), False),
        ("fastembed", config(truncation_side="left"), True),
        ("vespa", config(additional_special_tokens=["hello"]), False),
        ("milvus", config(do_lower_case=False), False),
        ("milvus", all_of(config(do_lower_case=False), LOWER), True),
        ("optimum", all_of(config(do_lower_case=False), LOWER), False),
        ("infinity", all_of(config(do_lower_case=False), LOWER), True),
    ],
)
def test_the_form_of_a_target_is_compared(tmp_path: Path, target: str, change: Change, differs: bool) -> None:
    """A vocabulary, a file that is read alone, or all files through transformers."""
    found, row = written(minilm(tmp_path / "model", change)), TARGETS[target]
    source = Source.find(str(tmp_path / "model"))
    consumer = class_of(row)(row, row.usages[0], source, None, found.own.tokenizer)
    if target == "anserini":
        consumer.files(found.folder, None)
    if not differs:
        consumer.check_tokens(found.own, found.folder, found.texts)
        return
    with pytest.raises(CheckpointError, match=f"{row.title} would read other tokens"):
        consumer.check_tokens(found.own, found.folder, found.texts)


@pytest.fixture(scope="module")
def cased(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkpoint whose tokenizer.json lower-cases, against its settings, and its export."""
    folder = tmp_path_factory.mktemp("cased")
    checkpoint = Path(shutil.copytree(workshop.checkpoint("tiny-encoder"), folder / "checkpoint"))
    config(do_lower_case=False)(checkpoint)
    export_model(ExportOptions(str(checkpoint), output=folder / "m.onnx", exporter="torchscript", head="none"))
    return checkpoint, folder / "m.onnx"


def test_a_file_says_which_tokenizer_is_effective(cased: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Infer reads it without transformers, which may not be installed where models are served."""
    checkpoint, path = cased
    content = (path.with_suffix("") / "tokenizer.json").read_bytes()
    assert ModelFile.open(path).metadata["onnxtool.tokenizer_sha256"] == hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(tokens, "load_by_transformers", lambda _folder: pytest.fail("transformers was asked"))
    (read,) = load(path, provider="cpu").tokenizer.encode(["Hello World"])
    assert [list(read.ids)] == ids_of_transformers(checkpoint, ["Hello World"])


def test_the_folder_of_a_checkpoint_is_read_as_transformers_reads_it(cased: tuple[Path, Path], tmp_path: Path) -> None:
    """Where it is named, and where it lies beside a file without a stamp."""
    checkpoint, path = cased
    wanted = ids_of_transformers(checkpoint, ["Hello World [MASK]"])
    shutil.copytree(checkpoint, tmp_path / "m")
    bare = ModelFile.open(path).path
    for named in (str(checkpoint), str(tmp_path / "m")):
        (read,) = load(bare, model_name=named, provider="cpu").tokenizer.encode(["Hello World [MASK]"])
        assert [list(read.ids)] == wanted


def test_infer_refuses_a_folder_that_it_would_read_otherwise(cased: tuple[Path, Path], tmp_path: Path) -> None:
    """As export does."""
    checkpoint, path = cased
    folder = Path(shutil.copytree(checkpoint, tmp_path / "m"))
    config(split_special_tokens=True)(folder)
    with pytest.raises(InputError, match="onnxtool would read other tokens than BertTokenizer"):
        load(path, model_name=str(folder), provider="cpu")


def test_a_checkpoint_that_is_exported_beside_itself_keeps_its_tokenizer(cased: tuple[Path, Path]) -> None:
    """It is refused where that says something else, not replaced."""
    checkpoint, _ = cased
    before = (checkpoint / "tokenizer.json").read_bytes()
    with pytest.raises(CheckpointError, match="reads texts differently from its tokenizer.json"):
        export_model(ExportOptions(str(checkpoint), output=checkpoint.with_suffix(".onnx"), force=True))
    assert (checkpoint / "tokenizer.json").read_bytes() == before


def test_a_tokenizer_that_runs_in_python_is_named_in_a_note(tmp_path: Path) -> None:
    """CANINE numbers characters: no file can say that, and the graph takes ids all the same."""
    from transformers import CanineTokenizer

    (tmp_path / "config.json").write_text("{}")
    job: Any = SimpleNamespace(tokenizer=CanineTokenizer(), request=SimpleNamespace(source=Source.find(str(tmp_path))))
    (note,) = _tokenizer_notes(job)
    assert note.startswith("no tokenizer.json, because CanineTokenizer runs in Python")
