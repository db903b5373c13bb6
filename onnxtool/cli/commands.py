"""The names of all commands, with what each of them does."""

# Each lives in the module of its name; it is imported when it is run, or when its own help is asked for.
COMMANDS = {
    "export": "Export a Hugging Face checkpoint to a verified ONNX file.",
    "optimize": "Fuse and convert an ONNX file, verified against what went in.",
    "infer": "Run texts through an ONNX file, or time it.",
    "encode": "Encode a collection on several machines.",
    "verify": "Compare an ONNX file with what it was made from.",
    "stats": "Summarize an ONNX file, or its difference from another.",
    "evaluate": "Measure on a test collection how well a model finds.",
    "artifacts": "Make what on-device training needs, of standard operators.",
    "release": "Make a verified, described and signed release, or check one.",
    "env": "Show versions, execution providers, and what is wrong here.",
    "clean": "Finish or remove what killed runs have left.",
    "completion": "Let a shell complete commands, options, paths and checkpoints.",
}

# Of commands that are groups.
SUBCOMMANDS = {
    "encode": {
        "run": "Encode a collection by several processes, and publish it.",
        "part": "Encode a part of a collection.",
        "merge": "Check what all parts have encoded, and publish it as one.",
        "status": "Show how far all parts are.",
    }
}

# All that can be run, as it is written: `encode part` is one.
RUNNABLE = tuple(f"{name} {inner}".strip() for name in COMMANDS for inner in SUBCOMMANDS.get(name, ("",)))

# The same, as tables of configuration files are called.
TABLES = tuple(name.replace(" ", "_") for name in RUNNABLE)
