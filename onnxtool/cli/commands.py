"""The names of all commands, with a one-line description of each."""

from __future__ import annotations

# Each lives in the module of the same name, which is imported only to run the command or show its help.
COMMANDS = {
    "export": "Export a Hugging Face checkpoint to a verified ONNX file.",
    "optimize": "Fuse and convert an ONNX file, verified against the input.",
    "infer": "Run texts through an ONNX file, or time it.",
    "encode": "Encode a collection on several machines.",
    "verify": "Compare an ONNX file with its source.",
    "stats": "Summarize an ONNX file, or its difference from another.",
    "evaluate": "Measure retrieval quality on a test collection.",
    "artifacts": "Make on-device training artifacts from standard operators.",
    "release": "Make a verified, described and signed release, or check one.",
    "env": "Show versions, execution providers, and setup problems.",
    "completion": "Set up shell completion of commands, options and paths.",
}

# Subcommands of command groups.
SUBCOMMANDS = {
    "encode": {
        "run": "Encode a collection with several processes, and publish it.",
        "part": "Encode one part of a collection.",
        "merge": "Check the output of all parts, and publish it as one.",
        "status": "Show the progress of all parts.",
    }
}

# Everything that can be run, as typed: `encode part`, for example.
RUNNABLE = tuple(f"{name} {inner}".strip() for name in COMMANDS for inner in SUBCOMMANDS.get(name, ("",)))

# The same by the names of configuration tables; a release has a file of its own.
TABLES = {name.replace(" ", "_"): name for name in RUNNABLE if name not in ("release", "completion")}
