"""Kill runs that encode a collection at random moments, and compare what they have written in the end.

MiniLM in int8 on documentation strings. Runs are killed and run again until they end: workers and drivers by SIGKILL,
on a disk and in an object store whose server fails (`moto` has to be installed), and of Ray the driver, and whole
nodes. Their files, manifest and rejected lines have to be those of one run of `onnxtool infer`. `--overhead` measures
Ray compared with local workers instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # comes with accelerate, without types
from bench_infer import make_minilm
from documentation_texts import documentation_texts
from harness.machine import describe_machine
from harness.pages import print_head, print_row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.encoding.corpora import contents_of, write_lines

SHARD = 50
SPLIT = 20_000  # bytes
COMMAND = (sys.executable, "-m", "onnxtool")
# What is killed: a word in the command line of its process.
TARGETS = {"workers": "spawn_main", "drivers": "encode", "nodes": "raylet/raylet"}
_COLUMNS = (*TARGETS, "jobs", "wrong", "half")


def write_corpus(folder: Path, texts: list[str]) -> Path:
    """Write a collection, with a line that has no text and one that repeats an id."""
    rows = [{"id": f"d{place}", "contents": text} for place, text in enumerate(texts)]
    rows.insert(len(rows) // 2, {"id": "d3", "contents": "again"})
    path = folder / "corpus.jsonl"
    write_lines(path, [*map(json.dumps, rows), "{", ""], rows_of_group=70)
    return path


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own."""
    command = [*COMMAND, *arguments, "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def run(*arguments: str) -> None:
    """Run a command to its end."""
    subprocess.run([*COMMAND, *arguments, "--quiet"], check=True, stdout=subprocess.DEVNULL)


def options_of(model: Path, corpus: Path, output: Path | str) -> tuple[str, ...]:
    """Return the options that all runs share."""
    shards = ("--provider", "cpu", "--shard_size", str(SHARD), "--split_bytes", str(SPLIT))
    return ("--model_path", str(model), "--input", str(corpus), "--output", f"{output}/", *shards)


def remove(output: Path) -> None:
    """Remove a folder of vectors, and the files next to it that belong to it."""
    for path in (output, *output.parent.glob(f"{output.name}.*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def processes_of(target: str, driver: int) -> list[int]:
    """Return the processes of a driver that a target stands for."""
    if target == "drivers":
        return [driver]
    try:
        children = psutil.Process(driver).children(recursive=True)
        return [child.pid for child in children if TARGETS[target] in " ".join(child.cmdline())]
    except psutil.NoSuchProcess:  # a process has ended meanwhile
        return []


def kill_runs(folder: Path, model: Path, texts: list[str], kills: int, *, engine: str) -> dict[str, int]:
    """Run until all is encoded, killing something at a random moment; return how often each was killed."""
    chance = random.Random(0)  # noqa: S311  no secret
    corpus, whole, output = write_corpus(folder, texts), folder / "whole" / "vectors", folder / "vectors"
    counts = dict.fromkeys(_COLUMNS, 0)
    run("infer", *options_of(model, corpus, whole), "--force")
    expected = contents_of(whole)
    targets = list(TARGETS)[: 3 if engine == "ray" else 2]
    while sum(counts[name] for name in targets) < kills:
        counts["jobs"] += 1
        remove(output)
        for _ in range(100):
            driver = start("encode", "run", *options_of(model, corpus, output), "--engine", engine, "--processes", "2")
            if sum(counts[name] for name in targets) < kills:
                target = chance.choice(targets)
                while engine == "ray" and driver.poll() is None and not processes_of("workers", driver.pid):
                    time.sleep(0.05)  # Ray takes some seconds to start
                time.sleep(chance.uniform(0.5, 4.0) if engine == "local" else chance.uniform(0, 3.0))
                for number in processes_of(target, driver.pid)[:1]:
                    if driver.poll() is None:
                        os.kill(number, signal.SIGKILL)
                        counts[target] += 1
            if driver.wait() == 0:
                break
        counts["half"] += any(".partial" in name for name in contents_of(output))
        counts["wrong"] += contents_of(output) != expected
    return counts


def kill_in_store(folder: Path, model: Path, texts: list[str], kills: int) -> dict[str, int]:
    """Kill parts that write into a store, two at a time, until all is encoded; compare its contents."""
    from tests.encoding.store_server import STORES, store_server

    chance = random.Random(1)  # noqa: S311  no secret
    counts = dict.fromkeys(_COLUMNS, 0)
    with store_server(STORES[0]) as store:

        def contents(folder: str) -> dict[str, bytes]:
            return {key.removeprefix(folder): content for key, content in store.objects(folder).items()}

        os.environ.update(store.kind.environment(store.address))
        store.faults.error, store.faults.after, store.faults.dropped = 0.03, 0.02, 0.02
        corpus = write_corpus(folder, texts)
        run("infer", *options_of(model, corpus, f"{store.uri}/whole"), "--force")
        expected = contents("whole")
        part = ("encode", "part", *options_of(model, corpus, f"{store.uri}/vectors"))
        while counts["workers"] < kills:
            counts["jobs"] += 1
            store.contents.delete(*store.objects("vectors"))
            for _ in range(3):
                parts = [start(*part), start(*part)]
                time.sleep(chance.uniform(0.5, 3.0))
                for process in parts:
                    counts["workers"] += process.poll() is None
                    process.kill()
                    process.wait()
            run(*part)
            run("encode", "merge", "--output", f"{store.uri}/vectors", "--read_back")
            counts["wrong"] += contents("vectors") != expected
    return counts


def check_kills(folder: Path, model: Path, texts: list[str], kills: int) -> int:
    """Print a table of killed runs, and return how many ended in other bytes."""
    print_head(["killed", "workers", "drivers", "nodes", "jobs", "other bytes", "half files"])
    wrong = 0
    ways: dict[str, Callable[..., dict[str, int]]] = {
        "engine local, on a disk": partial(kill_runs, engine="local"),
        "engine ray, on a disk": partial(kill_runs, engine="ray"),
        "parts, in a store that fails": kill_in_store,
    }
    for title, kill in ways.items():
        counts = kill(folder, model, texts, kills)
        print_row(title, *counts.values())
        wrong += counts["wrong"] + counts["half"]
    return wrong


def measure_overhead(folder: Path, model: Path, num_texts: int, rounds: int, counts: Sequence[int]) -> None:
    """Print how long Ray and local workers take for the same corpus, in turns; starting Ray is not counted."""
    import ray

    from onnxtool.encoding import RunOptions, VectorOptions, encode_parts

    corpus = write_corpus(folder, documentation_texts(num_texts))
    ray.init(include_dashboard=False, log_to_driver=False)
    print_head(["workers", "local texts/s", "Ray texts/s", "Ray / local, of the same round"])
    for workers in counts:
        rates = []
        for engine in rounds * ("local", "ray"):
            options = VectorOptions(provider="cpu", shard_size=SHARD, split_bytes=SPLIT)
            chosen = RunOptions(engine=engine, processes=workers, workers=2 // workers, force=True)
            rates.append(encode_parts(model, corpus, folder / "vectors", options, chosen).texts_per_s)
        ratios = sorted(ray_rate / rate for rate, ray_rate in zip(rates[::2], rates[1::2], strict=True))
        local, cluster = statistics.median(rates[::2]), statistics.median(rates[1::2])
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print_row(workers, f"{local:.0f}", f"{cluster:.0f}", ratio)
    ray.shutdown()


def main() -> int:
    """Print the tables; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--kills", type=int, default=100, help="for each row of the table")
    parser.add_argument("--overhead", type=int, default=0, metavar="TEXTS", help="measure Ray with so many texts")
    parser.add_argument("--workers", type=int, nargs="+", default=(1, 2), help="of --overhead")
    parser.add_argument("--rounds", type=int, default=5, help="of --overhead")
    arguments = parser.parse_args()
    print(f"On {describe_machine()}, {arguments.texts} texts in shards of {SHARD}:\n")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, _, int8 = make_minilm(folder)
        if arguments.overhead:
            measure_overhead(folder, int8, arguments.overhead, arguments.rounds, arguments.workers)
        else:
            wrong = check_kills(folder, int8, documentation_texts(arguments.texts), arguments.kills)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
