"""The passes, one idea a file. Which of them run, and in which order, stands in onnxtool/optimize/presets.py."""
