"""What users write without onnxtool, run by `python -c`: the counterparts that figures are ratios to."""

from __future__ import annotations

# As transformers and torch write it; arguments: folder, exporter, attention, output.
EXPORT_WITH_TORCH = """
import inspect, sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
folder, exporter, attention, output = sys.argv[1:]
model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation=attention).eval()
tokens = AutoTokenizer.from_pretrained(folder)(["some text", "another one"], return_tensors="pt")
# In the order of the signature, in which torch puts them and gives them their names.
tokens = {name: tokens[name] for name in inspect.signature(model.forward).parameters if name in tokens}
names = dict(input_names=list(tokens), output_names=["logits"], opset_version=18 if exporter == "dynamo" else 17)
batch, sequence = (torch.export.Dim(name) for name in ("batch_size", "sequence"))
if exporter == "dynamo":
    shapes = {name: {0: batch, 1: sequence} for name in tokens}
    torch.onnx.export(model, kwargs=tokens, f=output, dynamo=True, dynamic_shapes=shapes, external_data=False, **names)
else:
    axes = {name: {0: "batch_size", 1: "sequence"} for name in [*tokens, "logits"]}
    arguments = (tokens["input_ids"], {name: value for name, value in tokens.items() if name != "input_ids"})
    torch.onnx.export(model, arguments, output, dynamo=False, dynamic_axes=axes, **names)
"""
# Arguments of both: source, output; the model is BERT-base.
OPTIMIZE_WITH_ONNXRUNTIME = """
import sys
from onnxruntime.transformers import optimizer
model = optimizer.optimize_model(sys.argv[1], model_type="bert", num_heads=12, hidden_size=768)
model.save_model_to_file(sys.argv[2])
"""
OPTIMIZE_WITH_ONNXSCRIPT = """
import sys, onnx_ir as ir
from onnxscript.rewriter.ort_fusions import optimize_for_ort
model, _ = optimize_for_ort(ir.load(sys.argv[1]))
ir.save(model, sys.argv[2])
"""
DESCRIBE_WITH_ONNX = """
import collections, json, sys, onnx
model = onnx.load(sys.argv[1])
print(json.dumps(collections.Counter(node.op_type for node in model.graph.node)))
"""
# Programs of a virtual environment that describe the file behind them.
INSPECTORS = {
    "polygraphy inspect model": ("polygraphy", "inspect", "model"),
    "onnxslim --inspect": ("onnxslim", "--inspect"),
}
