"""The package version, used in pyproject.toml and stamped into generated files."""

__version__ = "0.1.0"
# The command and the import are onnxtool; PyPI treats that name as equal to the existing package onnx-tool.
DISTRIBUTION = "onnxtool-cli"
