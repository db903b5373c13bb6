"""Encode shards of a plan by worker processes: a part of them here, or all of them here or by a cluster.

An engine only schedules: it hands runs of shards to workers. What is done, the records say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Any

from onnxtool.encoding.locations import AnyLocation, Uri
from onnxtool.encoding.options import CorpusProgress
from onnxtool.encoding.parts import PartOptions, merge_parts, missing_shards, shard_ranges, wanted_shards
from onnxtool.encoding.plan import CorpusPlan, read_plan
from onnxtool.encoding.processes import share_out
from onnxtool.encoding.ray import run_on_ray
from onnxtool.encoding.records import PartRecord, Records
from onnxtool.encoding.report import PartReport, RunReport
from onnxtool.encoding.workers import OnEvent, RunOptions, Worker, runs_of
from onnxtool.errors import StoreError
from onnxtool.options import checked
from onnxtool.progress import listener
from onnxtool.runtime.session import available_cores

# More threads of one interpreter wait for each other: a twentieth of the work holds its lock.
_THREADS_OF_A_WORKER = 8


@checked
def encode_part(plan_path: AnyLocation, options: PartOptions | None = None) -> PartReport:
    """Encode shards of a plan in a worker process; those that are done are left as they are.

    Raises:
        InputError: there is no such plan or part, or model, corpus or versions are not those that were planned with.
        OnnxtoolError: as `encode_corpus`.
    """
    options = options or PartOptions()
    start = time.perf_counter()
    plan = read_plan(plan_path)
    wanted = wanted_shards(plan, options)
    with plan.folder.writing():
        missing = missing_shards(plan, wanted)
        tally = _Tally(plan, missing)
        if missing:
            run_here(plan, options.of_a_run(), missing, tally.add)
    seconds = time.perf_counter() - start
    num_texts = sum(plan.shards[number].texts for number in missing)
    return PartReport(
        plan=str(plan.path),
        output=str(plan.folder.path),
        shards=shard_ranges(wanted),
        num_shards=len(wanted),
        num_encoded_shards=len(missing),
        num_texts=sum(plan.shards[number].texts for number in wanted),
        num_encoded=num_texts,
        num_deaths=tally.num_deaths,
        num_left_out=tally.num_left_out,
        seconds=seconds,
        texts_per_s=num_texts / seconds,
    )


@checked
def encode_plan(
    plan_path: AnyLocation,
    options: RunOptions | None = None,
) -> RunReport:
    """Encode all shards of a plan that are not done, and publish the vectors: `encode_part` by workers, `merge_parts`.

    Raises:
        InputError: there is no such plan, or model, corpus or versions are not those that were planned with.
        OnnxtoolError: as `encode_corpus`.
    """
    options = options or RunOptions()
    start = time.perf_counter()
    plan = read_plan(plan_path)
    with plan.folder.writing():
        missing = missing_shards(plan, range(len(plan.shards)))
        before = len(plan.shards) - len(missing)
        tally = _Tally(plan, missing)
        with _EarlyRecords(plan) as early:

            def add(event: dict[str, Any]) -> None:
                early.add(event)
                tally.add(event)

            num_workers = _run(plan, options, missing, add) if missing else 0
    merged = merge_parts(plan.path, known=early.found)
    seconds = time.perf_counter() - start
    return RunReport(
        plan=str(plan.path),
        output=str(plan.folder.path),
        manifest=merged.manifest,
        engine=options.engine,
        workers=num_workers,
        num_shards=len(plan.shards),
        num_encoded_shards=len(plan.shards) - before,
        num_texts=merged.num_texts,
        num_encoded=sum(plan.shards[number].texts for number in missing),
        num_tokens=merged.num_tokens,
        num_rejects=merged.num_rejects,
        rejects_path=merged.rejects_path,
        num_deaths=tally.num_deaths,
        num_left_out=tally.num_left_out,
        size_bytes=merged.size_bytes,
        seconds=seconds,
        texts_per_s=tally.num_texts / seconds,
        to_do=merged.to_do,
        problems=merged.problems,
        notes=merged.notes,
    )


def _run(plan: CorpusPlan, options: RunOptions, missing: Sequence[int], on_event: OnEvent) -> int:
    if options.engine == "ray":
        return run_on_ray(plan, options, missing, on_event)
    return run_here(plan, options, missing, on_event)


class _EarlyRecords:
    """Reads the records of shards as they are done: of a store, all of them in the end would take as long as a shard.

    Attributes:
        found: the records, by the numbers of their shards; those that are missing here are read when they are needed.
    """

    def __init__(self, plan: CorpusPlan) -> None:
        self.found: dict[int, PartRecord] = {}
        self._records = Records(plan.folder, plan.sha256) if isinstance(plan.folder.path, Uri) else None
        self._readers = ThreadPoolExecutor(8, thread_name_prefix="records")

    def __enter__(self) -> _EarlyRecords:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.shutdown(cancel_futures=True)

    def add(self, event: dict[str, Any]) -> None:
        """Read the record of a shard that a worker has done."""
        if "shard" in event and self._records is not None:
            self._readers.submit(self._read, self._records, event["shard"])

    def _read(self, records: Records, number: int) -> None:
        with suppress(StoreError):  # it is read later, and then the failure is said
            record = records.read(number)
            if not isinstance(record, str):
                self.found[number] = record


@dataclass
class _Tally:
    """Adds up what workers say."""

    plan: CorpusPlan
    missing: Sequence[int]
    start: float = field(default_factory=time.perf_counter)
    num_texts: int = 0
    num_tokens: int = 0
    num_rejects: int = 0
    num_deaths: int = 0
    num_left_out: int = 0

    def __post_init__(self) -> None:
        self._tell = listener()  # of the thread that begins: workers are heard in others
        self._lock = threading.Lock()
        self._total = max(1, sum(self.plan.shards[number].texts for number in self.missing))

    def add(self, event: dict[str, Any]) -> None:
        """Count an answer of a worker, in whichever thread it comes."""
        with self._lock:
            self.num_texts += event.get("batch", 0)
            self.num_tokens += event.get("tokens", 0)
            self.num_rejects += event.get("rejects", 0)
            self.num_deaths += event.get("deaths", 0)
            self.num_left_out += "left_out" in event
            seconds = time.perf_counter() - self.start
            share = min(1.0, self.num_texts / self._total)
            self._tell(
                CorpusProgress(
                    num_texts=self.num_texts,
                    share=share,
                    texts_per_s=self.num_texts / seconds,
                    seconds_left=seconds * (1 - share) / share if share else None,
                    tokens_per_s=self.num_tokens / seconds,
                    num_rejects=self.num_rejects,
                )
            )


def run_here(plan: CorpusPlan, options: RunOptions, missing: Sequence[int], on_event: OnEvent) -> int:
    """Encode shards by processes of this machine; return how many there were."""
    cores = available_cores()
    count = min(options.workers or max(1, cores // _THREADS_OF_A_WORKER), len(missing))
    runs = runs_of(missing, count) if count > 1 else [list(missing)]
    threads_of_each = max(1, cores // count) if count > 1 else 0
    started = [Worker(options.worker(plan, threads_of_each)) for _ in range(count)]

    def encode(worker: Worker, numbers: list[int]) -> None:
        before = worker.deaths
        try:
            worker.encode(numbers, on_event)
        finally:
            on_event({"deaths": worker.deaths - before})

    with ExitStack() as stack:
        for worker in started:
            stack.enter_context(closing(worker))
        share_out(started, runs, encode)
    return count
