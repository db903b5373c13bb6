"""Refuse compiled files on another provider, version or processor than their own."""

from __future__ import annotations

from onnxtool.errors import ModelFileError, ProviderError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import Compiled, digest_of_blocks, digest_of_start
from onnxtool.model_file.wire import read_texts
from onnxtool.runtime.providers import ExecutionProvider, provider_hardware, provider_version, runtime_version

CONTEXT = "ep_cache_context"  # the attribute that names the compiled part
_AGAIN = "run onnxtool optimize --compile here, on the file that it was made from"


def describe(compiled: ModelFile, provider: ExecutionProvider, context: str) -> Compiled:
    """Describe what a provider has just compiled into the file `context` next to its graph."""
    size, part = compiled.path.stat().st_size, compiled.path.with_name(context)
    return Compiled(
        provider=provider.place,
        version=provider_version(provider),
        runtime=runtime_version(),
        hardware=provider_hardware(provider),
        context=context,
        context_sha256=digest_of_blocks(part),
        graph_bytes=size,
        graph_sha256=digest_of_start(compiled.path, size),
    )


def require_runs_here(model: ModelFile, compiled: Compiled, provider: ExecutionProvider) -> None:
    """Refuse a compiled file on another provider, in another version and on other hardware, or if it was changed.

    Raises:
        ProviderError: it was compiled for another provider, version or hardware.
        ModelFileError: its graph or its compiled part was changed.
    """
    stated = (compiled.provider, f"version {compiled.version}", f"onnxruntime {compiled.runtime}", compiled.hardware)
    if provider.row.is_reference:
        actual: tuple[str, ...] = (provider.place,)
    else:
        version = f"version {provider_version(provider)}"
        actual = (provider.place, version, f"onnxruntime {runtime_version()}", provider_hardware(provider))
    for wanted, present in zip(stated, actual, strict=False):
        if wanted != present:
            remedy = f"pass --provider {wanted}, or use the file that it was made from"
            remedy = remedy if wanted == compiled.provider else _AGAIN
            raise ProviderError(f"{model.path} is compiled for {wanted}, and here is {present}", remedy)
    part = model.path.with_name(compiled.context)
    problem = ""
    if [*read_texts(model.path, CONTEXT)] != [compiled.context] or set(model.structure.ops) != {
        "com.microsoft::EPContext"
    }:
        problem = f"its graph does not read {compiled.context} alone"
    elif digest_of_start(model.path, compiled.graph_bytes) != compiled.graph_sha256:
        problem = "its graph was changed"
    elif not part.is_file():
        problem = f"{compiled.context} is missing beside it"
    elif digest_of_blocks(part) != compiled.context_sha256:
        problem = f"{compiled.context} was changed, or belongs to another file"
    if problem:
        raise ModelFileError(f"{model.path} is not what {compiled.provider} compiled: {problem}", _AGAIN)
