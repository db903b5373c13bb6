"""The passes, one idea per file. onnxtool/optimize/presets.py defines which of them run, and in which order."""
