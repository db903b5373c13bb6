"""What a file is that is no ONNX model, known by how it begins; its name may say anything."""

from __future__ import annotations

_HEAD_BYTES = 1024
_EXPORT = "pass the folder of the checkpoint to onnxtool export --model_name"
_ORIGIN = "export the checkpoint that it was made of: onnxtool export --model_name"
_ITSELF = "pass the .onnx file"
_DOWNLOAD = "download the file itself: its address has /resolve/ where that of the page has /blob/"
# Where the bytes stand, the bytes, what the file is, and the way out.
_BEGINNINGS = (
    (0, b"version https://git-lfs", "a Git LFS pointer to a file that was not fetched", "run `git lfs pull`"),
    (0, b"GGUF", "a GGUF file, as llama.cpp reads them", _ORIGIN),
    (4, b"TFL3", "a TensorFlow Lite model", _ORIGIN),
    (4, b"ORTM", "a model in onnxruntime's own format", "pass the .onnx file that it was made of"),
    (0, b"\x89HDF\r\n", "an HDF5 file, as Keras writes them", _ORIGIN),
    (0, b"PAR1", "a Parquet file", _ITSELF),
    (0, b"\x93NUMPY", "an array of NumPy", _ITSELF),
    (0, b"\x1f\x8b", "a file packed by gzip", "unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "a file packed by zstd", "unpack it first"),
    (0, b"\xfd7zXZ", "a file packed by xz", "unpack it first"),
    (0, b"%PDF", "a PDF file", _ITSELF),
    (257, b"ustar", "a tar archive", "unpack it first"),
)
# Of text, in lower case.
_TEXTS = (
    (
        b"<!doctype html",
        "a web page",
        _DOWNLOAD,
    ),
    (b"<html", "a web page", _DOWNLOAD),
    (b"<?xml", "an XML file, as OpenVINO writes them", _ORIGIN),
    (b"{", "a JSON file", _ITSELF),
    (b"[", "a JSON file", _ITSELF),
)


def foreign_format(head: bytes, size: int) -> tuple[str, str] | None:
    """Return what a file is that is no ONNX model, and the way out; None where that is not known.

    Args:
        head: the first kilobyte.
        size: of the file, in bytes.
    """
    for place, magic, name, hint in _BEGINNINGS:
        if head[place : place + len(magic)] == magic:
            return name, hint
    if head[:4] == b"PK\x03\x04":
        is_torch = b"/data.pkl" in head[:_HEAD_BYTES] or b"/.format_version" in head[:_HEAD_BYTES]
        return ("a file of PyTorch", _EXPORT) if is_torch else ("a ZIP archive", "unpack it first")
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle, as older PyTorch writes its files", _EXPORT
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < size:
        return "a file of safetensors", _EXPORT
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return next(((name, hint) for begin, name, hint in _TEXTS if text.startswith(begin)), None)
