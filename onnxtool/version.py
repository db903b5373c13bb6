"""The version of this package, which pyproject.toml and files of ours are stamped from."""

__version__ = "0.1.0"
# The command and the import are onnxtool; PyPI takes that name for the one of another package, onnx-tool.
DISTRIBUTION = "onnxtool-cli"
