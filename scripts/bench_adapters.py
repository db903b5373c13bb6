"""Compare a base with adapters at run time with merged files: errors against PEFT, memory, and time in turns.

`python scripts/bench_adapters.py` takes MiniLM and a Qwen3 with random weights, and two random adapters of each.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from harness.machine import describe_machine
from make_models import place_trained

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model
from onnxtool.model_file import ModelFile
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session

SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2}
SIZES |= {"head_dim": 64, "intermediate_size": 1536, "vocab_size": 30522}
ADAPTERS = {"legal": (8, "some"), "medical": (16, "all-linear")}
# A program that runs a file, and then with adapters, and prints its peak memory in bytes.
RUN = """
import re, sys
from pathlib import Path
import numpy as np
from onnxtool.model_file import ModelFile
from onnxtool.runtime.session import open_session
model = ModelFile.open(sys.argv[1])
session = open_session(model, provider="cpu", threads=1)
feeds = {name: np.ones((16, 16), np.int64) for name in model.input_names}
for each in 3 * [session, *(session.running(model.with_adapter(name)) for name in sys.argv[2:])]:
    each.run(feeds)
print(1024 * int(re.search("VmHWM: *\\t* *([0-9]+)", Path("/proc/self/status").read_text())[1]))
"""
TEXTS = ["A model is exported, optimized and verified before it is kept.", "A cat sits on the mat."] * 8


def make_checkpoints(folder: Path) -> dict[str, Path]:
    """Write the bases, and adapters of each in a folder beside it."""
    place_trained(folder)
    torch.manual_seed(0)
    bases = {"MiniLM": folder / "all-MiniLM-L6-v2", "Qwen3": folder / "qwen3"}
    transformers.Qwen3Model(transformers.Qwen3Config(**SIZES)).save_pretrained(bases["Qwen3"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(bases["MiniLM"])
    tokenizer.save_pretrained(bases["Qwen3"])
    for name, base in bases.items():
        for adapter, (rank, targets) in ADAPTERS.items():
            some: Any = ["query", "value", "q_proj", "v_proj"] if targets == "some" else targets
            settings = peft.LoraConfig(r=rank, target_modules=some, init_lora_weights=False)
            model = peft.get_peft_model(transformers.AutoModel.from_pretrained(base), settings)
            model.save_pretrained(folder / name / adapter)
    return bases


def peft_states(base: Path, adapter: Path | None, feeds: dict[str, Any]) -> Any:
    """Return the states of a batch by PEFT."""
    model = transformers.AutoModel.from_pretrained(base)
    model = (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()
    with torch.no_grad():
        return model(**{name: torch.from_numpy(array) for name, array in feeds.items()})[0].numpy()


def sessions_of(file: Path, names: Sequence[str | None]) -> list[Session]:
    """Open a file once, and return its session with each adapter."""
    model = ModelFile.open(file)
    first = open_session(model, provider="cpu", threads=1)
    return [first.running(model.with_adapter(name)) for name in names]


def peak_bytes(file: Path, names: Sequence[str]) -> int:
    """Return the peak memory of a process of its own that runs a file without an adapter and with these."""
    done = subprocess.run([sys.executable, "-c", RUN, file, *names], capture_output=True, check=True, encoding="utf-8")
    return int(done.stdout)


def ratios(first: Session, second: Session, feeds: dict[str, Any], rounds: int) -> float:
    """Return the median ratio of the times of two sessions, in turns."""

    def seconds(session: Session) -> float:
        start = time.perf_counter()
        session.run(feeds)
        return time.perf_counter() - start

    return statistics.median(seconds(first) / seconds(second) for _ in range(rounds))


def main() -> None:
    """Print a table for each base."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    warnings.simplefilter("ignore")
    print(describe_machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for base_name, base in make_checkpoints(folder).items():
            adapters = [folder / base_name / adapter for adapter in ADAPTERS]
            plain, file = folder / base_name / "plain.onnx", folder / base_name / "base.onnx"
            export_model(ExportOptions(base, output=plain, head="none"))
            export_model(ExportOptions(base, output=file, head="none", adapters=adapters))
            read = transformers.AutoTokenizer.from_pretrained(base)(TEXTS, padding=True, return_tensors="np")
            feeds = {name: read[name] for name in ModelFile.open(file).input_names}
            one = {name: array[:1] for name, array in feeds.items()}
            files = [(plain, file), (make_optimized(plain), make_optimized(file))]
            print(f"{base_name}: file, adapter, error from PEFT, time of 1 and {len(TEXTS)} texts / merged, bytes")
            for plain_file, adapted in files:
                for session, adapter in zip(sessions_of(adapted, [None, *ADAPTERS]), [None, *adapters], strict=True):
                    wanted, found = peft_states(base, adapter, feeds), session.run(feeds)["last_hidden_state"]
                    error = np.abs(found - wanted)[feeds["attention_mask"] > 0].max()
                    (merged,) = sessions_of(plain_file, [None])  # of the same shapes as the merged file
                    times = [ratios(session, merged, given, rounds) for given in (one, feeds)]
                    size = (session.model.adapter or adapted).stat().st_size
                    print(f"{adapted.name:20} {adapter.name if adapter else 'base':8} {error:9.1e}", end=" ")
                    print(f"{times[0]:6.2f} {times[1]:6.2f} {size:12,}")
                peaks = [peak_bytes(adapted, names) for names in ([], [*ADAPTERS])]
                extra = sum(adapted.with_name(one.file).stat().st_size for one in ModelFile.open(adapted).adapters)
                print(
                    f"  peak {peaks[0]:,} base, {peaks[1]:,} with both; {peaks[1] / (peaks[0] + extra):.3f} of the sum"
                )


def make_optimized(path: Path) -> Path:
    """Optimize a file."""
    output = path.with_name(f"{path.stem}-optimized.onnx")
    optimize_model(OptimizeOptions(path, output=output, timing=False))
    return output


if __name__ == "__main__":
    main()
