"""Texts that a model takes as chats: whole ones, and those that are longer than the model takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from onnxtool.checkpoint.chat_templates import ChatTemplate
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import Limit
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.infer.chats import Chats, LongTexts

WORDS = ["<s>", "</s>", "query", "document", "user", "system", "answer", "a", "b", "c", "0", "1", "2", "3", "4"]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}answer {{ eos_token }}"
LIMIT = Limit(6, "the test")
CUT = LongTexts()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    """A template over a tokenizer of words, which puts <s> before a text that is no chat."""
    folder = tmp_path_factory.mktemp("chats")
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", WORDS.index("<s>"))]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    files = CheckpointFolder(folder)
    template = ChatTemplate.of(files, files.sentence_modules, "text-ranking")
    assert template is not None
    return Chats(template, TextTokenizer(files))


def words(chats: Chats, text: str | tuple[str, str], prompt: str = "", long: LongTexts = CUT) -> str:
    """Return the tokens of a text."""
    ((window,),) = chats.tokenize([text], prompt, LIMIT, long)
    return " ".join(WORDS[token] for token in window.ids)


def test_a_text_a_pair_and_a_prompt_are_messages(chats: Chats) -> None:
    """The tokenizer puts nothing around them."""
    assert words(chats, "a b") == "user a b answer </s>"
    assert words(chats, ("a", "b")) == "query a document b answer </s>"
    assert words(chats, "a", "b") == "system b user a answer </s>"


def test_what_the_template_has_behind_a_text_stays_where_the_text_is_cut(chats: Chats) -> None:
    """A decoder answers at the last token."""
    assert words(chats, "a b c " * 5) == "user a b c answer </s>"
    assert words(chats, ("a", "b c " * 5)) == "query a document b answer </s>"
    assert words(chats, "a b c " * 5, "c") == "system c user a answer </s>"
    cut = replace(chats, template=replace(chats.template, restores_end=False), _ends={})
    assert words(cut, "a b c " * 5) == "user a b c a b"


def test_a_chat_is_not_read_in_windows(chats: Chats) -> None:
    """The template is for a whole text; a short one needs no windows."""
    assert words(chats, "a", long=LongTexts("window")) == "user a answer </s>"
    with pytest.raises(InputError, match="cannot be read in windows"):
        words(chats, "a b c " * 5, long=LongTexts("window"))
    with pytest.raises(InputError, match="text 1 has more than 6 tokens"):
        words(chats, "a b c " * 5, long=LongTexts("fail"))


def test_a_pair_needs_a_template_that_takes_it(chats: Chats) -> None:
    """A text alone does not."""
    other = replace(chats, template=replace(chats.template, source="{{ messages[0].content }}"), _ends={})
    assert words(other, "a") == "a"
    with pytest.raises(InputError, match="leaves out the document of a pair"):
        words(other, ("a", "b"))
