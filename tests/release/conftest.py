"""A hub that is none, for all tests of releases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.release.hub import TOKEN, Hub, running


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub(TOKEN)
    with running(found):
        # As HF_ENDPOINT, HF_HUB_DISABLE_XET and HF_TOKEN would, which are read when the library is imported.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, found.url)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found
