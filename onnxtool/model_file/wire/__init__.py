"""Read a model's structure from its protobuf wire format, without its weights, with the standard library only.

Weights make up nearly all of a model file, and the structure far less than one percent, so this reader walks the
length-delimited fields and jumps over every tensor payload: it takes milliseconds instead of seconds, and has no 2 GB
limit. Field numbers are those of onnx.proto3 in the ONNX specification.

A model file is untrusted input: every length is checked against the message that contains it, nesting and memory are
bounded, and malformed input raises a ModelFileError with the byte position of the fault.
"""

from onnxtool.model_file.wire.messages import DTYPE_NAMES as DTYPE_NAMES
from onnxtool.model_file.wire.messages import ExternalData as ExternalData
from onnxtool.model_file.wire.messages import Tensor as Tensor
from onnxtool.model_file.wire.messages import external_file as external_file
from onnxtool.model_file.wire.structure import Constant as Constant
from onnxtool.model_file.wire.structure import Node as Node
from onnxtool.model_file.wire.structure import Structure as Structure
from onnxtool.model_file.wire.structure import check_sound as check_sound
from onnxtool.model_file.wire.structure import encode_metadata as encode_metadata
from onnxtool.model_file.wire.structure import read_constants as read_constants
from onnxtool.model_file.wire.structure import read_nodes as read_nodes
from onnxtool.model_file.wire.structure import read_structure as read_structure
from onnxtool.model_file.wire.structure import read_texts as read_texts
