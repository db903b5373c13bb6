"""Code that was written for onnxruntime-training 1.19.2 calls ours: the names and the order of all parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from onnxtool.training import api, artifacts, onnxblock

# As its public modules declare them. Left out: what it takes one value for and ours several of (ClipGradNorm), and how
# states and parameters are made, which users do not do.
_BLOCKS = {
    "Add.build": "input_name1 input_name2",
    "Sub.build": "input_name1 input_name2",
    "Mul.build": "input_name1 input_name2",
    "Div.build": "input_name1 input_name2",
    "Pow.__init__": "exponent",
    "Pow.build": "pow_input_name",
    "ReduceMean.__init__": "keepdims",
    "ReduceMean.build": "input_name",
    "ReduceSum.__init__": "keepdims",
    "ReduceSum.build": "input_name",
    "Sigmoid.build": "input_name",
    "Log.build": "input_name",
    "Neg.build": "input_name",
    "Abs.build": "input_name",
    "Constant.__init__": "value_float",
    "Constant.build": "",
    "Clip.__init__": "clip_min clip_max",
    "Clip.build": "clip_input_name",
    "InputLike.__init__": "like",
    "InputLike.build": "input_name",
    "LabelEncoder.__init__": (
        "default_float default_int64 default_string keys_floats keys_int64s keys_strings values_floats values_int64s "
        "values_strings"
    ),
    "LabelEncoder.build": "label_encoder_input_name",
    "Cast.__init__": "to",
    "Cast.build": "cast_input_name",
    "Linear.__init__": "in_features out_features bias alpha beta",
    "Linear.build": "linear_input_name",
}
_LOSSES = {
    "MSELoss.__init__": "reduction",
    "MSELoss.build": "loss_input_name target_name",
    "CrossEntropyLoss.__init__": "weight reduction ignore_index",
    "CrossEntropyLoss.build": "scores_input_name labels_name",
    "BCEWithLogitsLoss.__init__": "weight reduction pos_weight",
    "BCEWithLogitsLoss.build": "loss_input_name target_name",
    "L1Loss.__init__": "reduction",
    "L1Loss.build": "loss_input_name target_name",
}
_OPTIMIZERS = {
    "ClipGradNorm.__init__": "max_norm",
    "AdamW.__init__": "bias_correction betas eps weight_decay clip_grad",
    "SGD.__init__": "clip_grad",
}
_ONNXBLOCK = {
    "Block.infer_shapes_on_base": "",
    "ForwardBlock.to_model_proto": "",
    "TrainingBlock.requires_grad": "argument_name value",
    "TrainingBlock.parameters": "",
    "TrainingBlock.to_model_proto": "",
    "base": "model model_path",
    "empty_base": "opset_version",
    "custom_op_library": "custom_op_library_path",
    "save_checkpoint": "parameters path_to_checkpoint nominal_checkpoint",
    "load_checkpoint_to_model": "path_to_checkpoint model",
}
_ARTIFACTS = {
    "generate_artifacts": (
        "model requires_grad frozen_params loss optimizer artifact_directory prefix ort_format custom_op_library "
        "additional_output_names nominal_checkpoint loss_input_names"
    )
}
_API = {
    "Module.__init__": "train_model_uri state eval_model_uri device session_options",
    "Module.train": "mode",
    "Module.eval": "",
    "Module.lazy_reset_grad": "",
    "Module.get_contiguous_parameters": "trainable_only",
    "Module.get_parameters_size": "trainable_only",
    "Module.copy_buffer_to_parameters": "buffer trainable_only",
    "Module.export_model_for_inferencing": "inference_model_uri graph_output_names",
    "Module.input_names": "",
    "Module.output_names": "",
    "Optimizer.__init__": "optimizer_uri module",
    "Optimizer.step": "",
    "Optimizer.set_learning_rate": "learning_rate",
    "Optimizer.get_learning_rate": "",
    "LinearLRScheduler.__init__": "optimizer warmup_step_count total_step_count initial_lr",
    "LinearLRScheduler.step": "",
    "CheckpointState.load_checkpoint": "checkpoint_uri",
    "CheckpointState.save_checkpoint": "state checkpoint_uri include_optimizer_state",
}
_MODULES = (
    (onnxblock.blocks, _BLOCKS),
    (onnxblock.loss, _LOSSES),
    (onnxblock.optim, _OPTIMIZERS),
    (onnxblock, _ONNXBLOCK),
    (artifacts, _ARTIFACTS),
    (api, _API),
)
_CASES = [(module, name, wanted) for module, names in _MODULES for name, wanted in names.items()]


@pytest.mark.parametrize(("module", "name", "wanted"), _CASES, ids=[name for _, name, _ in _CASES])
def test_parameters_are_called_as_there(module: Any, name: str, wanted: str) -> None:
    """Ours may have more behind them, with defaults."""
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    parameters = [one for key, one in inspect.signature(found).parameters.items() if key != "self"]
    expected = wanted.split()
    assert [one.name for one in parameters[: len(expected)]] == expected
    assert all(one.default is not one.empty for one in parameters[len(expected) :])
