"""The license under which a model may be used: as its checkpoint says it, and as it is stamped into files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

LICENSE_KEY = "onnxtool.license"
LICENSE_NAME_KEY = "onnxtool.license_name"
LICENSE_LINK_KEY = "onnxtool.license_link"
UNKNOWN = "unknown"
OTHER = "other"

_MAX_CHARACTERS = 200


class License(NamedTuple):
    """A license as the front matter of a model card names it.

    Attributes:
        id: of SPDX, in lower case as the hub writes it; `other`, whose name is `name`; or `unknown`.
        name: of another license.
        link: to the text of another license.
    """

    id: str = UNKNOWN
    name: str = ""
    link: str = ""

    @classmethod
    def of_checkpoint(cls, card: Mapping[str, Any], config: Mapping[str, Any]) -> License:
        """Read what the card says, and where it says nothing the configuration.

        Several licenses are another one of their names: whether all of them hold or one may be chosen is not said.
        """
        for source in (card, config):
            named = source.get("license")
            ids = [_plain(one) for one in (named if isinstance(named, list) else [named])]
            ids = [one.lower() for one in ids if one]
            if len(ids) > 1:
                return cls(OTHER, ", ".join(ids), _plain(source.get("license_link")))
            if ids and ids[0] != UNKNOWN:
                return cls(ids[0], *(_plain(source.get(key)) for key in ("license_name", "license_link")))
        return cls()

    @classmethod
    def of_file(cls, metadata: Mapping[str, str]) -> License:
        """Read what is stamped."""
        return cls(
            _plain(metadata.get(LICENSE_KEY)).lower() or UNKNOWN,
            _plain(metadata.get(LICENSE_NAME_KEY)),
            _plain(metadata.get(LICENSE_LINK_KEY)),
        )

    @property
    def stamps(self) -> dict[str, str]:
        """Metadata of a file; empty where nothing is known."""
        entries = {LICENSE_KEY: self.id, LICENSE_NAME_KEY: self.name, LICENSE_LINK_KEY: self.link}
        return {key: value for key, value in entries.items() if value} if self.is_known else {}

    @property
    def is_known(self) -> bool:
        """Whether anything is known of it."""
        return self.id != UNKNOWN

    def is_among(self, allowed: Iterable[str]) -> bool:
        """Whether an allow-list has it, by its id, or another license by its name; case does not matter.

        An unknown license, and another one without a name, is in no list.
        """
        said = self.name if self.id == OTHER else "" if self.id == UNKNOWN else self.id
        names = {name.strip().casefold() for one in allowed for name in (one, *one.split(","))}
        return bool(said) and said.casefold() in names

    def __str__(self) -> str:
        return f"{self.id} ({self.name})" if self.name else self.id


def _plain(value: Any) -> str:
    """Return a text in one line, without characters that a terminal obeys; empty for what is no text."""
    words = " ".join(value.split()) if isinstance(value, str) else ""
    return "".join(letter for letter in words if letter.isprintable())[:_MAX_CHARACTERS]
