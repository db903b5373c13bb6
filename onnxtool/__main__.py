"""Run onnxtool as `python -m onnxtool`."""

from onnxtool.cli import run

if __name__ == "__main__":
    run()
