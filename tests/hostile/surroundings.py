"""Cases around a sound model: templates, tokenizers, settings, odd files, configurations, leftovers, environments.

Each maker damages one thing in a folder that has `checkpoint/`, with `model.onnx` in it, and says what to run there.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hostile.tokenizer_parts import (
    LISTS,
    TEXT,
    bpe,
    replaced,
    sequence,
    special,
    split,
    template,
    unigram,
    wordpiece,
)

SIZES = (0, -1, 7, 10**5, 10**7, 10**9, 10**10, 2**31 - 1, 2**32, 2**60, 2**63, 10**30)
_HUGE_BYTES = 5 << 30
ENCODER, WRITER, PICTURES = (
    "bert-feature-extraction",
    "llama-text-generation-with-past",
    "mobilenet_v2-image-classification",
)
_INFER = ("infer", "--model_path", "checkpoint/model.onnx", "--quiet")
_EXPORT = ("export", "--model_name", "checkpoint", "--output", "out.onnx", "--quiet")
_OPTIMIZE = ("optimize", "--model_path", "checkpoint/model.onnx", "--output", "out.onnx", "--quiet")


@dataclass(frozen=True)
class Case:
    """What was done, the command that meets it, and the environment, limits of the system and closed streams it has."""

    damage: str
    command: tuple[str, ...]
    variables: Mapping[str, str | None] = field(default_factory=dict)
    limits: Mapping[int, int] = field(default_factory=dict)
    closed: tuple[int, ...] = ()


Maker = Callable[[Path, random.Random], Case]

# In each of them @ is one of SIZES.
TEMPLATES = (
    "{% set n=namespace(t='x'*999) %}{% for i in range(99) %}{% set n.t=n.t~n.t %}{% endfor %}{{ n.t }}",
    "{% set n=namespace(t=[1]) %}{% for i in range(60) %}{% set n.t=n.t+n.t %}{% endfor %}{{ n.t|length }}",
    *(
        "{{ messages|tojson(indent=@) }}",
        "{{ ('a b '*99999)|wordwrap(1) }}",
        "{{ ('a'*999999)|wordwrap(1,false,'y'*999) }}",
    ),
    *(
        "{% for i in range(@) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
    ),
    *(
        "{{ 'x'*@ }}",
        "{{ [0]*@ }}",
        "{{ messages[0].content*@ }}",
        "{{ range(99999)|join('y'*9999) }}",
        "{{ '%@d'%1 }}",
    ),
    *("{{ '{:>@}'.format(1) }}", "{{ '{:{w}}'.format(1,w=@) }}", "{{ '%*d'%(@,1) }}", "{{ '%.@f'%1 }}"),
    *("{{ '{0.__class__}'.format(1) }}", "{{ 'x'.center(@) }}", "{{ '1'.zfill(@) }}", "{{ '\\t'.expandtabs(@) }}"),
    "{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    *("{% include 'chat_template.jinja' %}", "{% import 'os' as o %}{{ o.system('touch gone') }}", "{% extends 'x' %}"),
    *("{{ 'a'" + "|upper" * 5_000 + " }}", "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "{% if 1 %}" * 3_000),
    *(
        "{% for x in [1] %}" * 300 + "{% endfor %}" * 300,
        "{{ " + "[" * 90 + "]" * 90 + " }}",
        "{{ " + "-" * 9_999 + "1 }}",
    ),
    *("{% set j=joiner('x'*@) %}{{ j() }}{{ j() }}", "{{ 10**@ }}", "{{ 7**7**7**7 }}", "{{ 10**5000 }}"),
    *("{{ 'x\\ny'|indent(@) }}", "{{ ('a\\n'*99999)|indent(99999) }}", "{{ cycler(*range(@)).next() }}"),
    *("{{ range(@)|list|length }}", "{{ range(99999)|slice(@)|list }}", "{{ [1]|batch(@,0)|list }}"),
    *("{{ ('a'*99999)|replace('a','b'*99999) }}", "{{ ('x'*999)|replace('','b'*@) }}", "{{ lipsum(n=@) }}"),
    *(
        "{{ ('('*99999)|urlize }}",
        "{{ ('a@b.'*99999)|urlize }}",
        "{{ ('<'*999999)|striptags }}",
        "{{ messages|pprint }}",
    ),
    *(
        "{{ raise_exception('x'*@) }}",
        "{{ raise_exception('\x1b[31mred\\nerror: no') }}",
        "{{ strftime_now('%Y'*9999999) }}",
    ),
    *("{{ strftime_now('%999999999d') }}", "{{ ''.__class__.__mro__ }}", "{{ self }}", "{{ caller() }}", "{% break %}"),
    *("{% generation %}{% endgeneration %}", "{{ messages.append(messages) }}", "{% raw %}", "{{ '\\ud800' }}", "\x00"),
    *("{#" * 99_999, "x" * 5_000_000, "{{ ('9'*5000)|int }}", "{{ 1e400|int }}", "{{ 1.5|round(@) }}", "{{ 1//0 }}"),
    *(
        "{{ none.x.y }}",
        "{{ 'x'.encode().hex('-',@) }}",
        "{{ 'x'.translate({120:'y'*@}) }}",
        "{{ 1 is divisibleby 0 }}",
    ),
    *(
        "{% set n=namespace() %}{% set n.n=n %}{{ n }}",
        "{{ range(9**9)|random }}",
        "{{ ('x'*9999999)|list|sort|length }}",
    ),
    *("{{ range(9999)|map('string')|map('center',9999)|join }}", "{{ ('ab'*999999)|groupby('x')|list }}"),
    *("{{ ('x '*9999999)|title|wordcount }}", "{{ (1<2)|tojson(indent='x'*@) }}", "{{ 'x'|truncate(@,1,'y'*@) }}"),
    *("{{ [range(@)]|sum(start=[]) }}", "{{ (@|string)*99999 }}", "{{ 'x'|filesizeformat }}", "{{ @|filesizeformat }}"),
    *(
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% set x %}{{ 'x'*@ }}{% endset %}{{ x~x }}",
        "{{ dict(a=range(@)|list)|xmlattr }}",
    ),
)
_SLOW_RULES = (
    *(
        r"\s+$",
        r"(\w+\s?)*!$",
        r".*.*.*=!",
        r"(?=.*z).",
        r"(a|a)*$",
        r"\p{L}+(?=\d)",
        r"(?:a?){30}a{30}",
        r"([^x]*x)?$",
    ),
    *(
        r"(.+)\1$",
        r"a{1,60000}",
        "(?:" * 200 + "a" + ")*" * 200,
        r"(?<!a{0,999}b)c",
        r"(?i)\X*$",
        r"^(?=(a+))\1b",
        r"\s*\n",
    ),
    *(
        r"(?>a*)*b",
        r"(a*?)*?$",
        "(" * 5_000 + ")" * 5_000,
        "|".join("a" * n for n in range(1, 500)),
        r"[[:alpha:]]+\d$",
    ),
)
_TEXTS = (
    " " * 100_000,
    "a" * 100_000,
    "hello world " * 9_000,
    "é中\u0301" * 20_000,
    "0" * 99_999,
    "[MASK]" * 9_999,
    "\n" * 99_999,
)


_MOST_CHARACTERS = 50_000_000  # of a damaged part; larger files are a kind of their own


def tokenizers(choices: random.Random) -> dict[str, dict[str, Any]]:
    """Return parts of tokenizer.json that grow, take long, nest deep or lie about a size; drawn numbers are in them."""
    size, rule, long = choices.choice(SIZES), choices.choice(_SLOW_RULES), "y" * choices.choice((99, 9_999))
    tokens = {"[S]": {"id": "[S]", "ids": [0] * choices.choice((1, 9_999)), "tokens": ["[S]"]}}
    whole = template([*[special("[S]")] * choices.choice((1, 20_000)), TEXT], (), tokens)
    grow = replaced(choices.choice(({"Regex": "x*"}, {"String": "a"}, {"String": ""})), long)
    small: dict[str, Any] = {
        "normalizer": choices.choice((grow, {"type": "Prepend", "prepend": long}, {"type": "NFKD"}, {"type": "Strip"})),
        "pre_tokenizer": choices.choice(
            (
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel"},
                {"type": "UnicodeScripts"},
                {"type": "FixedLength", "length": size},
            )
        ),
        "decoder": choices.choice(
            (
                grow,
                {"type": "Strip", "content": " ", "start": size, "stop": size},
                {"type": "Fuse"},
                {"type": "ByteFallback"},
            )
        ),
        "post_processor": whole,
    }
    part = choices.choice(list(LISTS))
    deep: dict[str, Any] = small[part]
    for _ in range(choices.choice((20, 120, 900))):
        deep = sequence(part, [deep])
    many = min(choices.choice((2, 9, 3_000)), _MOST_CHARACTERS // len(str(small[part])))
    added = {"single_word": True, "lstrip": True, "rstrip": True, "normalized": True, "special": False}
    pieces = {"continuing_subword_prefix": "##", "max_input_chars_per_word": size}
    behavior = choices.choice(("Removed", "Isolated", "MergedWithNext", "Contiguous"))
    return {
        "slow normalizer": {"normalizer": replaced({"Regex": rule}, "b")},
        "slow split": {"pre_tokenizer": split(rule, behavior, invert=choices.random() < 0.5)},
        "slow decoder": {"decoder": replaced({"Regex": rule}, "b")},
        f"many of {part}": {part: sequence(part, [small[part]] * many)},
        f"deep {part}": {part: deep},
        f"alone in {part}": {part: small[part]},
        "decoder of a prefix": {"decoder": {"type": "WordPiece", "prefix": long, "cleanup": True}},
        "decoder CTC": {"decoder": {"type": "CTC", "pad_token": "", "word_delimiter_token": long, "cleanup": True}},
        "decoder of BPE": {"decoder": {"type": "BPEDecoder", "suffix": ""}},
        "decoder Metaspace": {
            "decoder": {
                "type": "Metaspace",
                "replacement": choices.choice(("", "ab", "\0")),
                "prepend_scheme": "always",
                "split": True,
            }
        },
        "long words": {"model": wordpiece({"[UNK]": 0, "a": 1, "##a": 2}, **pieces)},
        "long prefix": {
            "model": wordpiece(
                {"[UNK]": 0, "a": 1}, continuing_subword_prefix=long * 99, max_input_chars_per_word=1_000
            )
        },
        "absurd unigram": {
            "model": unigram(
                [["a" * n, -n * 1e300] for n in range(choices.choice((1, 3_000)))], size, byte_fallback=True
            )
        },
        "equal unigram": {"model": unigram([["a", 0.0]] * 99_999, 0)},
        "dropout": {"model": bpe({"a": 0, "b": 1}, dropout=choices.choice((1.0, -1.0, 1e308)))},
        "merges in a circle": {
            "model": bpe({"a": 0, "aa": 1, "aaaa": 2}, ["a a", "aa aa", "a a"], fuse_unk=True, end_of_word_suffix=long)
        },
        "two models": {"model": {"type": "WordLevel", "vocab": {}, "merges": [], "unk_token": long}},
        "no model": {"model": choices.choice((None, [], {"type": "Quantum"}, {"type": None}))},
        "prefixes as added tokens": {
            "added_tokens": [{"id": n, "content": "a" * (n + 1), **added} for n in range(3_000)]
        },
        "thousands of added tokens": {
            "added_tokens": [{"id": n, "content": f"t{n} ", **added} for n in range(choices.choice((19_000, 60_000)))]
        },
        "one id many times": {"added_tokens": [{"id": 0, "content": f"t{n}", **added} for n in range(999)]},
        "processor of Roberta": {
            "post_processor": {
                "type": "RobertaProcessing",
                "sep": ["x", size],
                "cls": ["y", 0],
                "trim_offsets": True,
                "add_prefix_space": True,
            }
        },
        "processor of Bert": {"post_processor": {"type": "BertProcessing", "sep": [long, 0], "cls": [long, 2**32 - 1]}},
        "truncation": {
            "truncation": {
                "max_length": size,
                "strategy": choices.choice(("OnlyFirst", "OnlySecond", "LongestFirst")),
                "stride": choices.choice(SIZES),
                "direction": "Left",
            }
        },
        "padding": {
            "padding": {
                "strategy": choices.choice(("BatchLongest", {"Fixed": size})),
                "direction": "Left",
                "pad_to_multiple_of": choices.choice((None, *SIZES)),
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": long,
            }
        },
        "version": {"version": choices.choice(("9.9", "", None, size))},
    }


_CONFIG_KEYS = """
    num_hidden_layers num_attention_heads num_key_value_heads hidden_size intermediate_size vocab_size
    max_position_embeddings num_labels type_vocab_size head_dim pad_token_id chunk_size_feed_forward id2label
    architectures model_type layer_types rope_scaling rope_parameters quantization_config auto_map dtype torch_dtype
    transformers_version attn_implementation hidden_act pruned_heads layer_norm_eps is_decoder tie_word_embeddings
    text_config sub_configs problem_type label2id
"""
_WRITING_KEYS = """
    num_beams max_length max_new_tokens suppress_tokens bad_words_ids forced_decoder_ids temperature
    num_return_sequences cache_implementation no_repeat_ngram_size eos_token_id top_k top_p do_sample stop_strings
    begin_suppress_tokens repetition_penalty min_length pad_token_id length_penalty
"""
_PICTURE_KEYS = """
    size crop_size image_mean image_std rescale_factor resample do_pad size_divisor do_resize image_processor_type
    crop_pct max_pixels pad_size patch_size do_convert_rgb shortest_edge
"""
_VARIABLES = """
    HOME TMPDIR LANG LC_ALL PYTHONIOENCODING TERM COLUMNS LINES TZ PATH XDG_CACHE_HOME HF_HOME HF_HUB_CACHE
    OMP_NUM_THREADS TOKENIZERS_PARALLELISM USER CUDA_VISIBLE_DEVICES NO_COLOR MKL_NUM_THREADS ONNXTOOL_INFER_TOP_K
    ONNXTOOL_STATS_FORMAT TQDM_DISABLE HF_HUB_OFFLINE PYTHONHASHSEED_
"""


def _setting(choices: random.Random) -> Any:
    size = choices.choice(SIZES)
    deep: Any = size
    for _ in range(choices.choice((3, 300))):
        deep = choices.choice(({"a": deep}, [deep]))
    return choices.choice(
        (
            *(
                size,
                size,
                str(size),
                [size] * 3,
                {"height": size, "width": size},
                {"shortest_edge": size},
                deep,
                [deep] * 9,
            ),
            *(
                {str(n): f"label {n}" for n in range(99_999)},
                list(range(99_999)),
                [[0] * 99] * 999,
                "x" * 99_999,
                10**4_000,
            ),
            *(
                float("nan"),
                float("-inf"),
                1e-320,
                None,
                True,
                "\ud800",
                "../../../etc/passwd",
                ["gpt2"],
                {"type": "yarn", "factor": size},
            ),
            *(
                {"AutoConfig": "evil.Evil"},
                {"quant_method": "gptq", "bits": size},
                {size: size},
                "t5",
                "whisper",
                "timm_wrapper",
            ),
        )
    )


def _change_json(path: Path, changes: Mapping[str, Any]) -> None:
    content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)  # a part may nest deeper than Python writes
    try:
        path.write_text(json.dumps(content | dict(changes)), "utf-8")
    finally:
        sys.setrecursionlimit(usual)


def _model_of(folder: Path) -> str:
    """Return what kind of model the folder has."""
    kind = json.loads((folder / "checkpoint" / "config.json").read_text("utf-8"))["model_type"]
    return {"llama": WRITER, "mobilenet_v2": PICTURES}.get(kind, ENCODER)


def _asked(folder: Path, *texts: str) -> tuple[str, ...]:
    """Return the command that runs the model on texts, or on an image."""
    given = [part for text in texts or ("Hello world",) for part in ("--text", text)]
    if _model_of(folder) == PICTURES:
        from PIL import Image

        Image.new("RGB", (40, 30)).save(folder / "picture.png")
        return (*_INFER, "--image", "picture.png")
    return (*_INFER, *given, *(("--max_new_tokens", "3") if _model_of(folder) == WRITER else ()))


def damage_template(folder: Path, choices: random.Random) -> Case:
    """Give a decoder a chat template."""
    number = choices.randrange(len(TEMPLATES))
    text = TEMPLATES[number].replace("@", str(choices.choice(SIZES)))
    place = choices.choice(("chat_template.jinja", "tokenizer_config.json"))
    if place == "chat_template.jinja":
        (folder / "checkpoint" / place).write_text(text, "utf-8", "surrogatepass")
    else:
        stated = choices.choice((text, [{"name": "default", "template": text}]))
        _change_json(folder / "checkpoint" / place, {"chat_template": stated})
    return Case(f"template {number} in {place}: {text[:60]!r}", (*_asked(folder), "--chat"))


def damage_tokenizer(folder: Path, choices: random.Random) -> Case:
    """Put one part into tokenizer.json, or two, and read long texts."""
    pieces = tokenizers(choices)
    names = choices.sample(list(pieces), choices.choice((1, 1, 2)))
    for name in names:
        _change_json(folder / "checkpoint" / "tokenizer.json", pieces[name])
    text = choices.choice(_TEXTS)
    texts = ("Hello world", text + choices.choice(("", "!", "b")))
    if _model_of(folder) == WRITER or choices.random() < 0.5:
        return Case(" and ".join(names), _asked(folder, *(text[:40_000] for text in texts)))  # 128 kB an argument
    (folder / "texts.txt").write_text("\n".join(texts), "utf-8")
    return Case(" and ".join(names), (*_INFER, "--input", "texts.txt", "--output", "out.jsonl"))


def damage_settings(folder: Path, choices: random.Random) -> Case:
    """Change what sizes a model, a search or an image."""
    kind, exports, asked = _model_of(folder), choices.random() < 0.4, _asked(folder)
    names = {WRITER: ("generation_config.json", _WRITING_KEYS), PICTURES: ("preprocessor_config.json", _PICTURE_KEYS)}
    file, keys = ("config.json", _CONFIG_KEYS) if exports or kind == ENCODER else names[kind]
    changes = {key: _setting(choices) for key in choices.sample(keys.split(), choices.choice((1, 1, 2)))}
    _change_json(folder / "checkpoint" / file, changes)
    said = ", ".join(
        f"{key}={str(value)[:40]!r}" if not isinstance(value, int) else f"{key}~2^{value.bit_length()}"
        for key, value in changes.items()
    )
    return Case(f"{file}: {said}", _EXPORT if exports else asked)


def _files(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the files that commands read, with the command that does; those that are not there get a beginning."""
    data = folder / "data"
    (data / "qrels").mkdir(parents=True)
    (data / "corpus.jsonl").write_text('{"_id": "d", "title": "", "text": "hello"}\n', "utf-8")
    (data / "queries.jsonl").write_text('{"_id": "q", "text": "hello"}\n', "utf-8")
    (data / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n", "utf-8")
    evaluate = ("evaluate", *_INFER[1:], "--data", "data", "--cache", "out-cache")
    timed = (*_INFER, "--benchmark", "--runs", "2", "--batch_size", "1", "--sequence_length", "8")
    encode = ("encode", "run", *_INFER[1:], "--output", "out/", "--input")
    names = ("tokenizer.json", "config.json", "tokenizer_config.json", "modules.json", "special_tokens_map.json")
    settings = ("1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    weights = ("model.safetensors", "model.safetensors.index.json", "adapter_config.json", "README.md")
    return {
        **{f"checkpoint/{name}": _asked(folder) for name in (*names, *settings, "model.onnx")},
        **{f"checkpoint/{name}": _EXPORT for name in (*weights, "quantize_config.json", "2_Dense/model.safetensors")},
        **{
            f"texts.{end}": (*_INFER, "--input", f"texts.{end}", "--output", "out.jsonl")
            for end in ("txt", "jsonl", "txt.gz", "jsonl.gz")
        },
        **{f"many.{end}": (*encode, f"many.{end}") for end in ("txt", "jsonl", "parquet", "jsonl.gz")},
        **{f"data/{name}": evaluate for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "topics.tsv")},
        "run.trec": (*evaluate, "--candidates", "run.trec"),
        "inputs.npz": (*timed, "--sample_inputs", "inputs.npz"),
        "rows.txt": (
            *_INFER,
            "--input",
            "rows.txt",
            "--output",
            "out/",
            "--output_format",
            "npy",
            "--vectors_as",
            "int8",
            "--calibration",
            "rows.txt",
        ),
        "ranges.json": (
            *_INFER,
            "--input",
            "checkpoint/config.json",
            "--output",
            "out/",
            "--vectors_as",
            "int8",
            "--ranges",
            "ranges.json",
        ),
        "plan.toml": ("release", "--config", "plan.toml", "--output", "out"),
        "folder/manifest.json": ("release", "--check", "folder"),
        "folder/SHA256SUMS": ("release", "--check", "folder"),
        "out.parts/run.json": ("encode", "status", "--output", "out/"),
        "out.parts/part-00000.json": ("encode", "merge", "--output", "out/"),
        "base.onnx": ("stats", "checkpoint/model.onnx", "base.onnx"),
        "calibration.npz": (*_OPTIMIZE, "--precision", "int8", "--sample_inputs", "calibration.npz"),
        "reference.onnx": ("verify", "checkpoint/model.onnx", "reference.onnx", "--quiet"),
        "other.onnx": (*timed, "--compare", "other.onnx"),
        "weights/model.safetensors": (*timed, "--compare", "weights"),
        ".onnxtool.toml": ("stats", "checkpoint/model.onnx"),
        "pyproject.toml": ("stats", "checkpoint/model.onnx"),
        "picture.png": (*_INFER, "--image", "picture.png"),
    }


def damage_file(folder: Path, choices: random.Random) -> Case:
    """Let a file that a command reads be huge, endless, something else, or hollow."""
    files = _files(folder)
    name = choices.choice(list(files))
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = (
        "huge",
        "huge behind its beginning",
        "endless",
        "pipe",
        "folder",
        "loop",
        "gone",
        "null",
        "long",
        "deep",
        "lines",
        "digits",
    )
    kind = choices.choice((*kinds, "bomb", "bomb") if name.endswith(".gz") else kinds)
    if kind == "pipe" and name.startswith(("texts.", "rows.")):  # read as they come, and waited for
        kind = "gone"
    before = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    contents = {
        "huge": b"",
        "huge behind its beginning": before or b"[",
        "long": b"a" * 40_000_000,
        "deep": b"[" * 999_999,
        "lines": b"\n" * 9_999_999,
        "digits": b'{"a": ' + b"9" * 999_999 + b"}",
    }
    if kind in contents:
        path.write_bytes(contents[kind])
    if kind.startswith("huge"):
        os.truncate(path, _HUGE_BYTES)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("endless", "loop", "gone", "null"):
        path.symlink_to({"endless": "/dev/zero", "loop": path.name, "gone": "nowhere", "null": "/dev/null"}[kind])
    elif kind == "bomb":
        with gzip.open(path, "wb", 1) as file:
            file.writelines(b"a" * (1 << 20) for _ in range(200))
    return Case(f"{name}: {kind}", files[name])


def damage_options(folder: Path, choices: random.Random) -> Case:
    """Put a file of options into the folder."""
    from onnxtool.cli.commands import RUNNABLE
    from onnxtool.cli.entry import find_command

    command = choices.choice((_asked(folder), _OPTIMIZE, ("stats", "checkpoint/model.onnx"), ("env",)))
    owner = command[0] if choices.random() < 0.9 else choices.choice(list(RUNNABLE))
    names = [one.removeprefix("--") for option in find_command(owner).params for one in option.opts]
    odd = (
        *(
            "1e999",
            "nan",
            "9" * 5_000,
            "[" * 500 + "]" * 500,
            '{a = "b"}',
            '""',
            "true",
            "[]",
            "1979-05-27T07:32:00Z",
            "-0.0",
        ),
        *(
            '"mine.txt"',
            '"/etc/passwd"',
            '"../up"',
            '"\\u0000"',
            '"' + "x" * 99_999 + '"',
            "0x7fffffffffffffffff",
            '["a", 1]',
        ),
        *(
            '"https://127.0.0.1:9/x"',
            '"checkpoint"',
            '"out.onnx"',
            "'''\nerror: no'''",
            '"\\u001b[31m"',
            "inf",
            '"%s{0}"',
        ),
    )
    lines = [f"{choices.choice(names)} = {choices.choice(odd)}" for _ in range(choices.choice((1, 1, 3)))]
    file = choices.choice((".onnxtool.toml", "pyproject.toml"))
    table = f"tool.onnxtool.{owner}" if file == "pyproject.toml" else owner
    text = choices.choice(
        (
            *("[{}]\n{}\n",) * 9,
            "[{}]\n[{}]\n",
            "[[{}]]\n{}\n",
            "[{0}" + ".a" * 9_000 + "]\n{1}\n",
            "\ufeff[{}]\n{}\n",
            "[{}]\r{}\0",
            "[{}]\n{}\n" + "a.b.c.d = 1\n" * 2,
            "[{0}." + '"' + "x" * 9_999 + '"]\n{1}',
            "#" * 900_000 + "\n[{}]\n{}",
        )
    )
    (folder / file).write_text(text.format(table, "\n".join(lines)), "utf-8", newline="")
    (folder / "mine.txt").write_text("mine", "utf-8")
    return Case(f"{file}: {text[:12]!r} {owner} {'; '.join(lines)[:80]}", command)


def damage_leftovers(folder: Path, choices: random.Random) -> Case:
    """Put what a stranger says that a run left beside the output."""
    (folder / "mine").mkdir()
    (folder / "mine" / "mine.txt").write_text("mine", "utf-8")
    output = choices.choice(("out.onnx", "out.onnx", "other.onnx", "x" * 200))
    left = folder / f".{output}.{choices.choice(('aaaaaaaa', '00000000', 'zzzzzzzz'))}.partial"
    kind = choices.choice(("a folder", "a file", "a pipe", "a link", "a folder with a link", "a folder with a pipe"))
    if kind == "a file":
        left.write_text("theirs", "utf-8")
    elif kind == "a pipe":
        os.mkfifo(left)
    elif kind == "a link":
        left.symlink_to(folder / "mine")
    else:
        (left / "files").mkdir(parents=True)
        if "pipe" in kind:
            os.mkfifo(left / "files" / "pipe")
        elif "link" in kind:
            (left / "files" / "link").symlink_to(folder / "mine")
    command = choices.choice((_OPTIMIZE, _OPTIMIZE, ("stats", "out.onnx"), _asked(folder)))
    return Case(f"{left.name} is {kind}", command)


def damage_environment(folder: Path, choices: random.Random) -> Case:
    """Take something of the system away that programs expect."""
    where = str(folder)
    texts = (
        "",
        "\x1b[31m",
        "/nonexistent",
        "xx_YY.UTF-99",
        "latin-1",
        "ascii:surrogateescape",
        "0",
        "-1",
        str(2**63),
        "x" * 99_999,
    )
    names = _VARIABLES.split()
    command = choices.choice((_asked(folder), _OPTIMIZE, ("stats", "checkpoint/model.onnx"), ("env",), ("--help",)))
    kind = choices.choice(
        ("variable", "variable", "no variable", "handles", "space", "closed", "read-only", "size", "stack", "home")
    )
    if kind == "variable":
        changed: dict[str, str | None] = {
            name: choices.choice(texts) for name in choices.sample(names, choices.choice((1, 3)))
        }
        if changed.get("PYTHONIOENCODING", "") not in ("", "latin-1", "ascii:surrogateescape"):
            del changed["PYTHONIOENCODING"]  # Python itself does not start
        return Case(f"{ {name: (value or '')[:20] for name, value in changed.items()} }", command, changed)
    if kind == "no variable":
        gone = choices.sample(names, 5)
        return Case(f"without {gone}", command, dict.fromkeys(gone))
    if kind == "home":
        (folder / "file").write_text("", "utf-8")
        return Case("HOME and TMPDIR are a file", command, {"HOME": f"{where}/file", "TMPDIR": f"{where}/file"})
    if kind == "closed":
        closed = choices.choice(((0,), (1,), (2,), (0, 1), (0, 1, 2), (1, 2)))
        return Case(f"closed {closed}", command, closed=closed)
    if kind == "read-only":
        (folder / "out.onnx").mkdir()
        return Case("the output is a folder", _OPTIMIZE)
    number, limit = {
        "handles": (resource.RLIMIT_NOFILE, choices.choice((8, 16, 24, 40))),
        "space": (resource.RLIMIT_AS, choices.choice((150, 300, 500, 700, 1_500)) << 20),
        "size": (resource.RLIMIT_FSIZE, choices.choice((0, 1, 4_096, 100_000))),
        "stack": (resource.RLIMIT_STACK, choices.choice((512, 1_024)) << 10),
    }[kind]
    return Case(f"{kind} {limit}", command, limits={number: limit})


# The makers by kind, with the models that they damage.
KINDS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "template": (damage_template, (WRITER,)),
    "tokenizer": (damage_tokenizer, (ENCODER, WRITER)),
    "settings": (damage_settings, (ENCODER, WRITER, PICTURES)),
    "file": (damage_file, (ENCODER, WRITER)),
    "options": (damage_options, (ENCODER,)),
    "leftovers": (damage_leftovers, (ENCODER,)),
    "environment": (damage_environment, (ENCODER, WRITER)),
}
