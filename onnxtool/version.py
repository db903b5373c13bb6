"""The version of this package, which pyproject.toml and files of ours are stamped from."""

__version__ = "0.1.0"
