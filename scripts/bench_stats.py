"""Measure `onnxtool stats` beside the tools that inspect ONNX files, on exports of BERT-base size, as ratios.

    python scripts/bench_stats.py MODEL.onnx OTHER.onnx --peers VENV

Every command is a whole process, and all take turns; printed are medians of CPU and wall time and the peak of resident
memory. MODEL is described, and compared with OTHER; a file of 6 GB, most of it a hole, is made for the run from MODEL's
own structure. VENV is a virtual environment with polygraphy, onnxslim and onnx, all of which read every
weight; without it onnxtool is measured alone. What is missed of the targets is said, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.machine import describe_machine
from harness.processes import Usage, measure, median

TARGET_CPU_S, TARGET_PEAK_MIB, TARGET_DIFFERENCE_S = 0.08, 25, 0.12
TARGET_RATIO, TARGET_LARGE = 15, 2
LARGE_BYTES, NUM_LARGE = 6 << 30, 64
ONE, TWO, LARGE = "onnxtool stats MODEL", "onnxtool stats OTHER MODEL", "onnxtool stats, a file of 6 GB"
RUNS_A_ROUND = 3
INSPECTORS = ("polygraphy inspect model", "onnxslim --inspect")
PEERS = {
    "polygraphy inspect model": ("polygraphy", "inspect", "model"),
    "onnxslim --inspect": ("onnxslim", "--inspect"),
    "onnx.load": ("python", "-c", "import onnx, sys; onnx.load(sys.argv[1])"),
}


def _field(number: int, length: int) -> bytes:
    """Encode what precedes a length-delimited field of protobuf."""
    encoded = bytearray([number << 3 | 2])
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*encoded, length])


def make_large(model: Path, output: Path) -> None:
    """Write the nodes of `model` with 64 weights of 96 MB each, which are holes: the disk holds little of the 6 GB."""
    import onnx

    proto = onnx.load(model, load_external_data=False)
    small = [tensor for tensor in proto.graph.initializer if len(tensor.raw_data) <= 1024]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(small)
    with output.open("wb") as file:
        file.write(proto.SerializeToString())
        for index in range(NUM_LARGE):
            size = LARGE_BYTES // NUM_LARGE + index  # of other sizes each: holes are all equal, and would be compared
            head = onnx.TensorProto(name=f"layer.{index}.weight", data_type=onnx.TensorProto.UINT8, dims=[size])
            tensor = head.SerializeToString() + _field(9, size)
            initializer = _field(5, len(tensor) + size) + tensor
            file.write(_field(7, len(initializer) + size) + initializer)
            file.seek(size, os.SEEK_CUR)
        file.truncate(file.tell())


def measure_in_turn(commands: dict[str, Sequence[str | Path]], rounds: int) -> dict[str, Usage]:
    """Return the medians of each command, which take turns: what else the machine does bears on all of them alike."""
    words = {name: [str(word) for word in command] for name, command in commands.items()}
    for command in words.values():
        measure(command)  # fills the caches
    usages: dict[str, list[Usage]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in words.items():
            usages[name] += [measure(command) for _ in range(1 if name in PEERS else RUNS_A_ROUND)]
    return {name: median(found) for name, found in usages.items()}


def main() -> int:
    """Measure, print a table as Markdown, and say which targets are missed."""
    parser = argparse.ArgumentParser(description="Measure onnxtool stats beside its peers.")
    parser.add_argument("models", type=Path, nargs=2, metavar="MODEL")
    parser.add_argument("--peers", type=Path, help="a virtual environment with polygraphy, onnxslim and onnx")
    parser.add_argument("--rounds", type=int, default=5, help=f"of {RUNS_A_ROUND} runs of onnxtool, and one of a peer")
    arguments = parser.parse_args()
    # An installed package has its bytecode; a checkout may be told to write none.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        large = Path(folder) / "large.onnx"
        model, other = arguments.models
        # In a process of its own: a child's peak memory starts at its parent's, which onnx would make a gigabyte.
        maker = multiprocessing.get_context("spawn").Process(target=make_large, args=(model, large))
        maker.start()
        maker.join()
        stats = [sys.executable, "-m", "onnxtool", "stats"]
        commands: dict[str, Sequence[str | Path]] = {
            ONE: [*stats, model, "--format", "json"],
            TWO: [*stats, other, model, "--format", "json"],
            LARGE: [*stats, large, "--format", "json"],
        }
        for name, words in PEERS.items() if arguments.peers else ():
            commands[name] = [arguments.peers / "bin" / words[0], *words[1:], model]
        return report(measure_in_turn(commands, arguments.rounds))


def report(usages: dict[str, Usage]) -> int:
    """Print the table and the targets that are missed, and return how the process should exit."""
    one = usages[ONE]
    print(f"{describe_machine()}\n")
    print("| command | CPU s | wall s | peak MiB | CPU as a multiple |")
    print("|---|---:|---:|---:|---:|")
    for name, usage in usages.items():
        figures = f"{usage.cpu_s:.3f} | {usage.wall_s:.3f} | {_mib(usage):.1f} | {usage.cpu_s / one.cpu_s:.1f}"
        print(f"| {name} | {figures} |")
    targets = {
        f"one model in {TARGET_CPU_S} s of CPU": one.cpu_s <= TARGET_CPU_S,
        f"one model in {TARGET_PEAK_MIB} MiB": _mib(one) <= TARGET_PEAK_MIB,
        f"a difference in {TARGET_DIFFERENCE_S} s of CPU": usages[TWO].cpu_s <= TARGET_DIFFERENCE_S,
        f"6 GB within {TARGET_LARGE}x of one model": usages[LARGE].cpu_s <= TARGET_LARGE * one.cpu_s,
    }
    for name in INSPECTORS:
        if name in usages:
            targets[f"{TARGET_RATIO}x less CPU than {name}"] = usages[name].cpu_s >= TARGET_RATIO * one.cpu_s
    missed = [target for target, is_met in targets.items() if not is_met]
    print()
    print("\n".join(f"missed: {target}" for target in missed) or "all targets are met")
    return 1 if missed else 0


def _mib(usage: Usage) -> float:
    return usage.peak_mb * 1e3 / 1024


if __name__ == "__main__":
    sys.exit(main())
