"""Chat templates are rendered as transformers renders them, and those that would do harm end in one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from onnxtool.checkpoint import chat_templates
from onnxtool.checkpoint.chat_templates import ChatTemplate, common_end
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.errors import InputError

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
CHATML = (
    "{%- if messages[0].role == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>' }}\n"
    "{%- endif %}\n{%- for message in messages %}\n    {%- if message.role != 'system' %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}\n"
    "    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
IN_PARTS = (
    "{{ bos_token }}{% macro show(parts) %}{% for part in parts %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}{{ raise_exception('only text') }}{% endif %}{% endfor %}{% endmacro %}"
    "{% set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}"
    "{{ loop.index ~ '/' ~ loop.length ~ ' ' }}{{ show(m.content) }}{% if not loop.last %}, {% endif %}{% endfor %}"
    "{% generation %}{{ ns.count * 2 }} of {{ messages | length }}{% endgeneration %}{{ eos_token }}"
)
WITH_JSON = (
    "{% for m in messages %}{% if loop.first and m.role == 'user' %}{% continue %}{% endif %}{{ m | tojson }}"
    "{{ '%s: %d' % (m.role, 3) }}{{ '{}!'.format(m.role) }}{{ m.content.split(' ') | join('_') }}{% endfor %}"
    "{{ dict(a=1).items() | list }}{{ tools is none }}{{ enable_thinking | default('unset') }}"
)


def saved(folder: Path, template: str | None, *, format_: str = "auto", **chat: Any) -> CheckpointFolder:
    """Write the files of an embedder whose texts are messages."""
    backend = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings: dict[str, Any] = {"modality_config": {"text": forward, "message": {**forward, "format": format_}}}
    settings["processing_kwargs"] = {"chat_template": chat}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    (folder / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Transformer"}]')
    return CheckpointFolder(folder)


def read(folder: CheckpointFolder) -> ChatTemplate:
    """Read the template of an embedder."""
    template = ChatTemplate.of(folder, folder.sentence_modules, "sentence-similarity")
    assert template is not None
    return template


@pytest.mark.parametrize("prompt", ["", "Find what answers: "])
@pytest.mark.parametrize("template", [CHAT, CHATML, IN_PARTS, WITH_JSON])
def test_a_chat_is_that_of_transformers(tmp_path: Path, template: str, prompt: str) -> None:
    """Of a text and of a pair, with the variables that the checkpoint passes on."""
    found = read(saved(tmp_path, template, add_generation_prompt=True, enable_thinking=False))
    assert found.is_flat == (template != IN_PARTS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("naïve <café> 'x' & 1\n", ("who?", "she, he  ")):
        expected = tokenizer.apply_chat_template(found.messages(text, prompt), tokenize=False, **found.passed)
        assert found.render([text], prompt) == [expected]


def test_the_format_of_messages_is_the_one_that_is_stated(tmp_path: Path) -> None:
    """Where the checkpoint says nothing, the template tells."""
    assert not read(saved(tmp_path / "stated", CHAT, format_="structured")).is_flat
    folder = saved(tmp_path / "known", IN_PARTS)
    (folder.path / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert read(folder).is_flat


def test_the_task_reaches_templates_that_read_it(tmp_path: Path) -> None:
    """Others are not told of it."""
    found = read(saved(tmp_path / "reads", CHAT + "{% if task == 'query' %}?{% endif %}"))
    assert (found.render(["a"], "", "query"), found.render(["a"])) == (["[user] a?"], ["[user] a"])
    assert found.reads_task
    assert not read(saved(tmp_path / "other", CHAT)).reads_task


def test_a_template_may_lie_in_the_tokenizer_config(tmp_path: Path) -> None:
    """As older versions wrote it; of several, that called default is the one."""
    folder = saved(tmp_path, None)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for stated in (CHAT, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHAT}]):
        path.write_text(json.dumps({**config, "chat_template": stated}))
        assert read(CheckpointFolder(folder.path)).source == CHAT


def test_only_texts_that_are_encoded_or_ranked_are_chats(tmp_path: Path) -> None:
    """A checkpoint without modules is one where it ranks."""
    folder = saved(tmp_path, CHAT)
    assert ChatTemplate.of(folder, folder.sentence_modules, "text-generation") is None
    (tmp_path / "modules.json").unlink()
    plain = CheckpointFolder(tmp_path)
    assert ChatTemplate.of(plain, plain.sentence_modules, "sentence-similarity") is None
    found = ChatTemplate.of(plain, plain.sentence_modules, "text-ranking")
    assert found is not None
    assert found.source == CHAT


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "its tokenizer has none"),
        ([{"name": "rag", "template": CHAT}], "none called default"),
        (["x"], "none called default"),
        ({"default": CHAT}, "its chat_template is not a text"),
    ],
)
def test_a_checkpoint_without_a_template_is_refused(tmp_path: Path, template: Any, reason: str) -> None:
    """Its texts would be read as they are, which is another answer."""
    folder = saved(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    with pytest.raises(InputError, match=reason):
        read(CheckpointFolder(folder.path))


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Half a file, say."""
    folder = saved(tmp_path, CHAT)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(InputError, match="not UTF-8"):
        read(folder)


@pytest.mark.parametrize(
    ("template", "dropped"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "the query and the document"),
        ("{{ messages[0].content }}", "the document of a pair"),
        ("{{ messages[1].content }}", "the query of a pair"),
    ],
)
def test_a_template_that_leaves_out_a_part_of_a_pair_is_refused(tmp_path: Path, template: str, dropped: str) -> None:
    """As sentence-transformers refuses it: the score would be of nothing."""
    with pytest.raises(InputError, match=f"leaves out {dropped}"):
        read(saved(tmp_path, template)).require_pairs()


HARMFUL = {
    "{% if %}": "cannot be read: Expected an expression",
    "{{ messages": "cannot be read: unexpected end of template",
    "{{ raise_exception('roles must alternate') }}": "fails: roles must alternate",
    "{{ messages[0].x.y }}": "fails: 'dict object' has no attribute 'x'",
    "{{ ().__class__.__base__.__subclasses__() }}": "is unsafe",
    "{{ messages.append(1) }}": "is unsafe",
    "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}": "cannot store underscore-prefixed attributes",
    "{% include '/etc/passwd' %}": "no loader for this environment",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}": "fails: maximum recursion depth exceeded",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}": "takes more than 1 s",
    "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}": "more than 512 MB",
    "{{ 'x' * 10 ** 7 }}": "makes a chat of more than 1000",
}


@pytest.mark.parametrize("template", HARMFUL)
def test_a_template_that_would_do_harm_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """It came with a checkpoint: it reads nothing, changes nothing, and ends, with this process as it was."""
    monkeypatch.setattr(chat_templates, "_MAX_SECONDS", 1)
    with pytest.raises(InputError) as caught:
        read(saved(tmp_path, template)).render(["text"])
    assert HARMFUL[template] in caught.value.message
    assert caught.value.message.startswith(f"the chat template of {tmp_path} ")


def test_long_texts_are_no_harm(tmp_path: Path) -> None:
    """The bound grows with what a user passes."""
    text = "long text " * 300_000
    assert read(saved(tmp_path, CHAT)).render([text]) == [f"[user] {text}"]


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        ((1, 2, 8, 9), (1, 3, 4, 8, 9), (8, 9)),
        ((1, 2), (1, 3), ()),
        ((8, 9), (1, 8, 9), ()),  # nothing of a text is in the first
        ((), (1,), ()),
    ],
)
def test_the_end_of_a_template_is_what_two_chats_share(
    first: tuple[int, ...], second: tuple[int, ...], end: tuple[int, ...]
) -> None:
    """Of two texts that end otherwise."""
    assert common_end(first, second) == end
