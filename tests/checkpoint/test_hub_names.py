"""People call a checkpoint by its id, by the address of its page, or by a path of their system."""

from __future__ import annotations

import pytest

from onnxtool.checkpoint.hub_names import hub_id, is_path
from onnxtool.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("naver/splade-v3", ("naver/splade-v3", None)),
        ("bert-base-uncased", ("bert-base-uncased", None)),
        ("https://huggingface.co/naver/splade-v3", ("naver/splade-v3", None)),
        ("https://huggingface.co/naver/splade-v3/", ("naver/splade-v3", None)),
        ("http://www.huggingface.co/naver/splade-v3?library=transformers", ("naver/splade-v3", None)),
        ("huggingface.co/naver/splade-v3#use", ("naver/splade-v3", None)),
        ("hf.co/naver/splade-v3/tree/refs", ("naver/splade-v3", "refs")),
        ("https://huggingface.co/naver/splade-v3/blob/main/config.json", ("naver/splade-v3", "main")),
    ],
)
def test_the_address_of_a_page_is_an_id(name: str, expected: tuple[str, str | None]) -> None:
    """With the revision that the page shows."""
    assert hub_id(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "https://huggingface.co/naver",
        "https://huggingface.co/datasets/mteb/nq",
        "https://huggingface.co/a/b/discussions/3",
        "https://example.org/naver/splade-v3",
        "s3://bucket/model",
    ],
)
def test_an_address_without_a_model_is_refused(name: str) -> None:
    """By what it is, and not as a hub that cannot be reached."""
    with pytest.raises(CheckpointError, match=r"is no address of a model|is not the page of a model"):
        hub_id(name)


def test_a_page_of_another_revision_is_refused() -> None:
    """Which of the two is meant is not for us to say."""
    page = "https://huggingface.co/naver/splade-v3/tree/v1"
    assert hub_id(page, "v1") == ("naver/splade-v3", "v1")
    with pytest.raises(CheckpointError, match="is of the revision v1, and --revision is main"):
        hub_id(page, "main")


@pytest.mark.parametrize("name", ["/a", "./a", "../a", "~/a", "a/b/c", "a/b/", r"C:\models\x", "C:/models/x", r"a\b"])
def test_a_path_is_known_as_one(name: str) -> None:
    """So that a wrong one is no id that the hub does not have."""
    assert is_path(name)
    assert not is_path("naver/splade-v3")
