"""Simulate a cluster that encodes a collection by `onnxtool encode run`, with costs that are measured here first.

What is measured: how long a worker of this machine takes from its start to its first batch, and for a shard of MiniLM
in int8 (documentation strings, all cores). What is simulated: workers that take runs of shards as `runs_of` forms them,
differ in speed, are lost at random and come back after a while, and wait for the store at the end of each run; one
machine merges. Linear scaling is what the workers would take together if none were lost and none waited for anything.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_infer import make_minilm
from documentation_texts import documentation_texts, write_corpus
from harness.machine import describe_machine

from onnxtool.encoding import VectorOptions, make_plan
from onnxtool.encoding.parts import RECORDS_AT_ONCE
from onnxtool.encoding.plan import read_plan
from onnxtool.encoding.workers import RunOptions, Worker, runs_of
from onnxtool.runtime.session import available_cores

SHARD = 4096
_NAMES_OF_A_REQUEST = 1000
_DELETES_AT_ONCE = 20  # requests of obstore's
_REQUESTS_OF_A_SHARD = 3  # two files and a record
# Of one core, without waiting; measured at 10,000 records and 24,000 names.
_READ_A_RECORD_S, _CHECK_A_RECORD_S, _LIST_A_NAME_S = 0.0003, 0.00005, 0.00001


@dataclass(frozen=True)
class Costs:
    """What a worker needs, in seconds.

    Attributes:
        start: from the process to its first batch, without the model's way from the store.
        shard: for a shard of SHARD texts, among others.
        gap: more for a run of one shard, whose first texts are read and tokenized while nothing else is done.
        plan: to read SHARD texts for the plan.
    """

    start: float
    shard: float
    gap: float
    plan: float


@dataclass(frozen=True)
class Cluster:
    """What is assumed of a cluster.

    Attributes:
        lost_per_hour: the share of workers.
        back_s: after which a lost worker has a successor.
        latency_s: of a request to the store.
        spread: standard deviation of a worker's speed, and of a shard's.
    """

    workers: int
    lost_per_hour: float = 0.01
    back_s: float = 120.0
    latency_s: float = 0.05
    spread: float = 0.1


def measure(folder: Path, num_shards: int) -> Costs:
    """Encode some shards by one worker with all cores."""
    _, _, int8 = make_minilm(folder)
    texts = documentation_texts(SHARD)
    corpus = write_corpus(folder / "texts.jsonl", [text for _ in range(num_shards) for text in texts])
    report = make_plan(int8, corpus, folder / "vectors", VectorOptions(provider="cpu", shard_size=SHARD), force=True)
    plan = read_plan(report.plan)
    worker = Worker(RunOptions().worker(plan, available_cores()))
    start = time.perf_counter()
    times: list[float] = []
    first: list[float] = []

    def note(event: dict[str, Any]) -> None:
        now = time.perf_counter() - start
        if "shard" in event:
            times.append(now)
        elif not first:
            first.append(now)

    worker.encode(range(num_shards), note)
    alone = []
    for number in range(num_shards):
        before = time.perf_counter()
        worker.encode([number], lambda _: None)
        alone.append(time.perf_counter() - before)
    worker.close()
    shard = (times[-1] - first[0]) / num_shards
    return Costs(first[0], shard, max(0.0, statistics.median(alone) - shard), report.seconds / num_shards)


def simulate(costs: Costs, cluster: Cluster, num_texts: int, seed: int) -> dict[str, float]:
    """Return how many seconds a job takes, its parts, and what share of linear scaling that is."""
    chance = random.Random(seed)  # noqa: S311  no secret
    count = -(-num_texts // SHARD)
    runs = deque(runs_of(range(count), cluster.workers))
    speeds = [max(0.5, chance.gauss(1, cluster.spread)) for _ in range(cluster.workers)]
    rate = cluster.lost_per_hour / 3600
    # When a worker is free, or has its successor; who is lost with a run gives back what has no record.
    free = [(costs.start + 4 * cluster.latency_s, worker) for worker in range(cluster.workers)]
    heapq.heapify(free)
    end, lost = 0.0, 0
    while runs:
        now, worker = heapq.heappop(free)
        run = runs.popleft()
        loss = now + chance.expovariate(rate)
        # The files of a shard are sent while the next ones are computed; of the last one nothing is left to compute.
        now += costs.gap + _REQUESTS_OF_A_SHARD * cluster.latency_s
        for place in range(len(run)):
            took = costs.shard * speeds[worker] * max(0.5, chance.gauss(1, cluster.spread))
            now += took
            if now > loss:
                runs.appendleft(run[place:])
                lost += 1
                now = loss + cluster.back_s + costs.start
                break
        else:
            end = max(end, now)
        heapq.heappush(free, (now, worker))
    # Records and files, two to a shard, are listed in pieces at once, each to the page after its last; records are read
    # as shards are done, but for the last of each worker; the manifest is written, and the records are removed.
    pieces = math.ceil(count / 1000)
    deletes = math.ceil(math.ceil(count / _NAMES_OF_A_REQUEST) / _DELETES_AT_ONCE)
    requests = (2 + 3) * pieces + math.ceil(cluster.workers / RECORDS_AT_ONCE) + 1 + deletes
    computed = 3 * count * _LIST_A_NAME_S + cluster.workers * _READ_A_RECORD_S + count * _CHECK_A_RECORD_S
    merge = requests * cluster.latency_s + computed
    linear = count * costs.shard / sum(1 / speed for speed in speeds)
    return {"encode": end, "merge": merge, "linear": linear, "share": linear / (end + merge), "lost": lost}


def main() -> None:
    """Print the tables; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100_000_000)
    parser.add_argument("--shards", type=int, default=4, help="that are measured")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = measure(Path(folder), arguments.shards)
    print(
        f"Measured on {describe_machine(available_cores())}: a worker starts in {costs.start:.1f} s and encodes a shard"
    )
    print(
        f"of {SHARD} texts in {costs.shard:.2f} s, and one by itself in {costs.gap:.2f} s more; the plan reads it in "
        f"{costs.plan * 1e3:.0f} ms.\n"
    )
    print(f"{arguments.texts:,} texts, requests of 50 ms:\n")
    print("| workers | lost per hour | lost | linear s | encode s | merge s | share of linear scaling |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for workers in (10, 100, 300, 1000):
        for lost in (0.0, 0.01, 0.2):
            found = simulate(costs, Cluster(workers, max(lost, 1e-12)), arguments.texts, arguments.seed)
            print(
                f"| {workers} | {lost:.0%} | {found['lost']:.0f} | {found['linear']:.0f} | {found['encode']:.0f} | "
                f"{found['merge']:.0f} | {found['share']:.1%} |"
            )


if __name__ == "__main__":
    main()
