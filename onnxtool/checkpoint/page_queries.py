"""How retrievers of pages as pictures write a query, as the processors of transformers 5.23 do."""

from __future__ import annotations

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.tokenizer import TextTokenizer

_NAME = "processor_config.json"
_CLASS = "ColPaliProcessor"
_PREFIX = "Question: "
_NUM_AUGMENTING = 10  # tokens behind a query, in which the model may put what the query has no words for


def write_page_query(query: str, files: CheckpointFiles, tokenizer: TextTokenizer) -> str:
    """Return the text that is tokenized for `query`.

    Raises:
        OnnxtoolError: the checkpoint has another processor, or its tokenizer no token to begin or pad with.
    """
    settings = files.read(_NAME)
    if settings.get("processor_class") != _CLASS:
        raise files.refuse(
            f"{_NAME} of {files.label} names the processor {settings.get('processor_class')!r}, and queries are "
            f"written as {_CLASS} does"
        )
    prefix = settings.get("query_prefix", _PREFIX)
    begin, pad = (tokenizer.named_token(name) for name in ("bos_token", "pad_token"))
    if not isinstance(prefix, str) or begin is None or pad is None:
        raise files.malformed(_NAME, "query_prefix is no text, or the tokenizer has no bos_token or pad_token")
    return f"{begin}{prefix}{query}{pad * _NUM_AUGMENTING}\n"
