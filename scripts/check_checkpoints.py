"""Compare the answers of exported checkpoints with PyTorch's for one text, for each padding side, batch size and order.

`python scripts/check_checkpoints.py` makes tiny checkpoints of many architectures with a tokenizer that pads on the
right or on the left, exports each, and runs its file on texts of several lengths: one by one, in twos, all at once, and
in another order. It prints a table and fails where an output for a text is not the one that PyTorch has for it alone.
Then it compares the functions after the logits with the checkpoint's library (scripts/checkpoints/answers.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}

import numpy as np
import torch
import transformers
from checkpoints.answers import compare_answers
from zoo.checkpoint import NotRunnableError, make_checkpoint
from zoo.running import load_model
from zoo.tasks import Task, find_task

from onnxtool import ExportOptions, export_model
from onnxtool.errors import OnnxtoolError
from onnxtool.infer import LoadedModel, load

TEXTS = ("a", "words of some length, and a few more of them", "b c", "the last one 4 2", "once more, shorter")
_ENCODERS = (
    "albert bert big_bird camembert convbert deberta deberta-v2 electra flaubert fnet funnel longformer mpnet "
    "nystromformer roberta xlm xlm-roberta"
)
_DECODERS = (
    "biogpt bloom codegen ctrl falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj llama openai-gpt opt qwen3 xglm xlnet"
)
ARCHITECTURES = {
    "fill-mask": _ENCODERS,
    "feature-extraction": "bert big_bird deberta electra longformer nystromformer roberta t5",
    "text-generation": _DECODERS,
    "text-classification": "bart bert bloom convbert ctrl gpt2 gpt_neo llama openai-gpt opt qwen3 roberta xlnet",
    "token-classification": "bert gpt2 roberta xlnet",
}
ORDERS = {"in twos": (2, range(5)), "at once": (5, range(5)), "in another order": (5, (3, 0, 4, 2, 1))}
_TOLERANCE = 1e-3  # of the largest value
EQUAL, SAID, REFUSED, DIFFERENT, MISSING = "equal", "said", "refused", "DIFFERENT", "not runnable"


def main() -> int:
    """Print the table; return 1 where an answer depends on its batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="model types; default: those of each task")
    parser.add_argument(
        "--answers", nargs="?", const="", metavar="PART", help="only the functions after the logits, of rows with PART"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if arguments.answers is not None:
        return compare_answers(arguments.answers)
    counts: Counter[str] = Counter()
    print("| task | model type | tokenizer pads | stamped | one by one | in twos | at once | in another order |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        for task in arguments.tasks:
            for model_type in arguments.types or ARCHITECTURES[task].split():
                for side in ("right", "left"):
                    stamped, *found = _try(find_task(task), model_type, side, Path(work, task, model_type, side))
                    counts.update(found)
                    print(f"| {' | '.join((task, model_type, side, stamped, *found))} |", flush=True)
    print(", ".join(f"{count} {result.split(' by')[0]}" for result, count in counts.items()))
    return int(any(result.startswith(DIFFERENT) for result in counts)) | compare_answers()


def _try(task: Task, model_type: str, side: str, folder: Path) -> tuple[str, ...]:
    """Return the side that was stamped, and what came of each way to run the texts."""
    try:
        make_checkpoint(task, model_type, folder)
    except NotRunnableError as error:
        return f"{MISSING}: {str(error)[:120]}", MISSING
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "padding_side": side}), encoding="utf-8")
    try:
        output = folder.with_name(f"{side}.onnx")
        report = export_model(ExportOptions(str(folder), output=output, task=task.name, head="none"))
        model = load(output)
    except OnnxtoolError as error:
        return f"{REFUSED}: {' '.join(error.message.split())[:120]}", REFUSED
    # A file with a fixed length pads each text to it, and says by how much that moves PyTorch's outputs.
    is_said = report.verification is not None and (report.verification.length_effect or 0.0) > _TOLERANCE
    try:
        wanted = [dict(_run_pytorch(task, folder, text, model)) for text in TEXTS]
    except RuntimeError as error:  # Funnel takes no text of three tokens
        return f"{MISSING}: PyTorch raises {str(error)[:100]}", MISSING
    results = []
    for size, order in ({"one by one": (1, range(5))} | ORDERS).values():
        found = _run_file(model, [TEXTS[place] for place in order], size)
        apart = max(_apart(one, wanted[place]) for one, place in zip(found, order, strict=True))
        results.append(EQUAL if apart < _TOLERANCE else f"{SAID if is_said else DIFFERENT} by {apart:.2g}")
    return report.metadata.get("onnxtool.padding", ""), *results


def _run_pytorch(task: Task, folder: Path, text: str, model: LoadedModel) -> Iterator[tuple[str, Any]]:
    """Yield the outputs of the checkpoint for a text alone."""
    ids = torch.tensor([model.tokenize([text])[0].ids])
    reference = load_model(task, folder)
    with torch.inference_mode():
        outputs = reference(input_ids=ids, attention_mask=torch.ones_like(ids))
    names = [info.name for info in model.session.model.structure.outputs]
    yield from ((name, outputs[name][0].float().numpy()) for name in names)


def _run_file(model: LoadedModel, texts: list[str], size: int) -> list[dict[str, Any]]:
    """Return the outputs of the file for each text, run as `infer` does, at most `size` at a time."""
    rows: dict[int, dict[str, Any]] = {}
    read = model.tokenize(texts)
    for start in range(0, len(read), size):
        for group in model.batch_rules.batches([len(text) for text in read[start : start + size]]):
            batch = model.run([read[start + place] for place in group])
            for row, place in enumerate(group):
                mask = batch.mask[row]
                rows[start + place] = {
                    name: array[row][mask] if array.shape[1:2] == mask.shape else array[row]
                    for name, array in batch.outputs.items()
                }
    return [rows[place] for place in range(len(texts))]


def _apart(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the largest difference, relative to the largest value."""
    return max(
        float(np.abs(found[name] - value).max()) / max(1.0, float(np.abs(value).max()))
        if found[name].shape == value.shape
        else np.inf
        for name, value in wanted.items()
    )


if __name__ == "__main__":
    sys.exit(main())
