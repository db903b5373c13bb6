"""The example of the `onnxrt` backend's documentation runs with our imports; docs/ is tested in tests/docs."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

# As it stands in the document of the original, but for the imports of the backend.
_EXAMPLE = """
import os
import warnings
import numpy as np
import onnx
import torch
import torch.onnx
from onnxtool.torch_backend import dump_onnx, make_aot_ort, train_loop

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel


def ids_tensor(shape, vocab_size):
    total_dims = 1
    for dim in shape:
        total_dims *= dim

    values = []
    for _ in range(total_dims):
        values.append(np.random.randint(0, vocab_size - 1))

    return torch.tensor(data=values, dtype=torch.long).view(shape).contiguous()


config = LlamaConfig(
    hidden_size=16,
    num_hidden_layers=1,
    vocab_size=1024,
    intermediate_size=16,
    max_position_embeddings=1024,
    num_attention_heads=2,
)
config._attn_implementation = "eager"

model = LlamaModel(config)

batch, seq, vocab_size = 2, 1024, 1024

input_ids = ids_tensor([batch, seq], vocab_size)
input_mask = torch.tril(torch.ones(batch, seq, dtype=torch.float32))

model(input_ids, input_mask)
local_aot_ort, _ = make_aot_ort(
    dynamic=True,
    rewrite=True,
    verbose=1,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    optimized_mod = torch.compile(model, backend=local_aot_ort, fullgraph=True)
    with dump_onnx("dort-llama-ort", folder="dump_llama", clean=True):
        train_loop(optimized_mod, input_ids, input_mask)

names = [_ for _ in os.listdir("dump_llama") if _.endswith(".onnx")]
print("------------------------------------------")
print(f"exported model: {names}")
for name in names:
    print()
    print("NODES in {name!r}")
    onx = onnx.load(os.path.join("dump_llama", name))
    for i, node in enumerate(onx.graph.node):
        print(
            f"{i+1}/{len(onx.graph.node)}: {node.op_type} {node.input} -> {node.output}"
        )
"""
# Not in the document: the same step by eager PyTorch.
_COMPARISON = """
import copy
eager = copy.deepcopy(model)
ours, theirs = train_loop(optimized_mod, input_ids, input_mask), train_loop(eager, input_ids, input_mask)
torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
print("the same as eager")
"""


def run(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a program in this process, in a folder of its own, and return what it prints."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as a program sees them, once or not at all
        exec(compile(code, str(folder / "program.py"), "exec"), {"__name__": "__main__"})  # noqa: S102 - our own text
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_the_original_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama of one layer at 1024 tokens, trained for a step, both graphs dumped, the same numbers as eager."""
    printed = run(_EXAMPLE + _COMPARISON, tmp_path, monkeypatch, capsys)
    assert {path.name for path in (tmp_path / "dump_llama").iterdir()} >= {
        f"dort-llama-ort{number}.{suffix}" for number in (0, 1) for suffix in ("onnx", "txt")
    }
    assert "exported model: ['dort-llama-ort" in printed
    assert "the same as eager" in printed
