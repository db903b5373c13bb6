"""A small decoder that knows a text by heart, and so is as sure of tokens as a large one; massive activations in it."""

from __future__ import annotations

import pydoc_data.topics
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tests.workshop import Workshop

UNKNOWN, END = "<unk>", "</s>"
_LAYERS, _LENGTH, _STEPS = 2, 64, 300
_CHANNEL, _FACTOR = 5, 200.0


def sentences() -> list[str]:
    """Return 32 sentences of Python's documentation, which the decoder knows."""
    words = " ".join(
        " ".join(pydoc_data.topics.topics[name].split()) for name in ("class", "function", "import", "try")
    )
    return [f"{sentence}." for sentence in words.split(". ") if 40 < len(sentence) < 160][:32]


def checkpoint(workshop: Workshop) -> Path:
    """Return the folder of a Llama of characters, trained for seconds on `sentences`."""

    def make(folder: Path) -> None:
        import torch
        import transformers
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        characters = sorted({*map(chr, range(32, 127))})
        vocabulary = {character: place for place, character in enumerate([UNKNOWN, END, *characters])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=_LAYERS, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=128, max_position_embeddings=128, pad_token_id=1, bos_token_id=1,
            eos_token_id=1, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.tensor([vocabulary.get(character, 0) for character in " ".join(sentences())])
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for _ in range(_STEPS):
            starts = torch.randint(0, len(ids) - _LENGTH, (16, 1))
            batch = ids[starts + torch.arange(_LENGTH)]
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
        model.eval().save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_max_length=128, unk_token=UNKNOWN, eos_token=END
        ).save_pretrained(folder)

    return workshop.made("characters-checkpoint", make)


def plant(source: Path, folder: Path) -> None:
    """Copy a checkpoint with one channel times 200 before the gate and up projections, which do not read it."""
    import torch
    import transformers

    shutil.copytree(source, folder)
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[_CHANNEL] *= _FACTOR
            for product in (layer.mlp.gate_proj, layer.mlp.up_proj):
                product.weight[:, _CHANNEL] = 0
    model.save_pretrained(folder)


def export(source: Path, output: Path, *, with_cache: bool) -> None:
    """Export a checkpoint with its tokenizer beside it."""
    from onnxtool import ExportOptions, export_model

    task, exporter = ("text-generation-with-past", "dynamo") if with_cache else ("text-generation", "torchscript")
    export_model(ExportOptions(str(source), output=output, task=task, exporter=exporter, verify=False))


def generate(checkpoint: Path, prompts: list[list[int]], num_steps: int) -> NDArray[np.int64]:
    """Generate with PyTorch in float32, greedily, each prompt alone."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # each answer has all steps
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": num_steps}
    rows = [
        model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), **settings)
        for ids in prompts
    ]
    return np.concatenate([row.numpy()[:, len(ids) :] for row, ids in zip(rows, prompts, strict=True)])


def decode(path: Path, prompts: list[list[int]], num_steps: int) -> NDArray[np.int64]:
    """Decode greedily with onnxruntime alone, each prompt alone, through the cache if there is one."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs, outputs = session.get_inputs(), [one.name for one in session.get_outputs()]
    rows = []
    for prompt in prompts:
        ids, new, row = list(prompt), list(prompt), []
        cache = {
            one.name: np.zeros(
                [1 if not axis else (size if isinstance(size, int) else 0) for axis, size in enumerate(one.shape)],
                np.float32,
            )
            for one in inputs
            if one.name.startswith("past")
        }
        for _ in range(num_steps):
            given = {"input_ids": np.array([new if cache else ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
            given = {one.name: given[one.name] for one in inputs if one.name in given}
            found = dict(zip(outputs, session.run(None, given | cache), strict=True))
            cache = {name: found[name.replace("past_key_values", "present")] for name in cache}
            new = [int(found["logits"][0, -1].argmax())]
            ids += new
            row += new
        rows.append(row)
    return np.array(rows)
