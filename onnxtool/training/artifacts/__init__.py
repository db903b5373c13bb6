"""Training artifacts: make, verify and write the files that on-device training needs.

The names are the same as in onnxruntime-training's `artifacts` module.
"""

from onnxtool.training.artifacts.generation import LOSSES as LOSSES
from onnxtool.training.artifacts.generation import OPTIMIZERS as OPTIMIZERS
from onnxtool.training.artifacts.generation import ArtifactOptions as ArtifactOptions
from onnxtool.training.artifacts.generation import ArtifactReport as ArtifactReport
from onnxtool.training.artifacts.generation import generate_artifacts as generate_artifacts
from onnxtool.training.artifacts.generation import make_artifacts as make_artifacts
from onnxtool.training.options import LossType as LossType
from onnxtool.training.options import OptimType as OptimType
