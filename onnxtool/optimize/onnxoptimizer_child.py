"""Run one pass of onnxoptimizer in a child process, which ends if the pass crashes or loops."""

from __future__ import annotations

from base64 import b64decode, b64encode

import onnx

from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild

_LIMITS = (10, 1 << 30)  # seconds and bytes, for graphs without large weights
_CHILD = GuardedChild(f"{__name__}:answer", ("onnxoptimizer",))


class DeadPassError(Exception):
    """The pass raised an error, died, or exceeded a limit; the text says which."""


def run_pass(name: str, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the result of the pass `name` of onnxoptimizer.

    Raises:
        DeadPassError: there is none.
    """
    request, (seconds, num_bytes) = [name, b64encode(model.SerializeToString()).decode()], _LIMITS
    try:
        return onnx.ModelProto.FromString(b64decode(_CHILD.call(request, seconds=seconds, num_bytes=num_bytes)))
    except ChildError as error:
        raise DeadPassError(f"raises an error: {error}") from error
    except ChildEndedError as error:
        raise DeadPassError(error.reason(seconds, num_bytes)) from error


def answer(request: list[str]) -> str:
    """Run the pass; called in the child."""
    import onnxoptimizer

    result = onnxoptimizer.optimize(onnx.ModelProto.FromString(b64decode(request[1])), request[:1])
    return b64encode(result.SerializeToString()).decode()
