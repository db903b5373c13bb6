"""Worker processes that encode shards of a plan, and what they are told.

A worker that dies is started again; shards that end it twice are tried one by one, and in one that still does the text
is found that ends a process by itself. That one is rejected, with its id, and the job goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onnxtool.encoding.locations import Location
from onnxtool.encoding.options import InputElsewhere, MemoryLimit, ModelElsewhere
from onnxtool.encoding.processes import Died, WorkerProcess
from onnxtool.errors import SessionError
from onnxtool.interruption import check_interrupted
from onnxtool.options import UNSET, Option, Options

if TYPE_CHECKING:  # it loads what encodes, which an actor of Ray leaves to its worker
    from onnxtool.encoding.plan import CorpusPlan

ENGINES = ("local", "ray")
_MOST_OF_A_RUN = 64

OnEvent = Callable[[dict[str, Any]], None]


class RunOptions(Options):
    """How the shards of a plan are encoded.

    Attributes:
        engine: one of ENGINES.
        workers: processes; 0 for one for each eight cores of this machine, or for each node of the cluster.
        threads: batches that run at once in each of them; 0 for its share of the cores.
        memory_limit: megabytes that a worker may allocate, from which on a text is rejected; 0 for no limit.
        model_path: the model, where it is not at the place that the plan says.
        input_path: likewise the corpus.
    """

    engine: Annotated[
        str, Option("Where workers run: on this machine, or on the nodes of a Ray cluster.", choices=ENGINES)
    ] = "local"
    workers: Annotated[
        int,
        Option("Processes that encode.", minimum=0, default="one for each eight cores, of Ray one for each node"),
    ] = 0
    threads: Annotated[
        int, Option("Batches that run at once in each process.", minimum=0, default="its share of the cores")
    ] = 0
    memory_limit: MemoryLimit = 0
    model_path: ModelElsewhere = UNSET
    input_path: InputElsewhere = UNSET

    def worker(self, plan: CorpusPlan, threads: int) -> WorkerOptions:
        """Return what a worker has to know, as JSON has it."""
        return WorkerOptions(
            plan=_absolute(plan.path),
            model_path=None if self.model_path is None else _absolute(self.model_path),
            input_path=None if self.input_path is None else _absolute(self.input_path),
            threads=self.threads or threads,
            memory_bytes=self.memory_limit * 1_000_000,
        )


def _absolute(location: Location) -> str:
    """Write a location for a process with another working directory."""
    return str(location.resolve() if isinstance(location, Path) else location)


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker has to know; see RunOptions."""

    plan: str
    model_path: str | None
    input_path: str | None
    threads: int
    memory_bytes: int


class Worker:
    """A process that encodes shards, started again where it dies; see `onnxtool.encoding.worker`.

    Attributes:
        deaths: how often it died.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._process = WorkerProcess("onnxtool.encoding.worker", vars(options))
        self.deaths = 0

    def encode(self, numbers: Sequence[int], on_event: OnEvent) -> None:
        """Encode shards, and call `on_event` for each answer, also for texts that had to be left out.

        Raises:
            OnnxtoolError: what a worker has met, unless it is of a text.
        """
        left = list(numbers)
        while left:
            is_alone = len(left) == 1
            try:
                self._encode_or_retry(left, on_event)
            except (Died, SessionError):
                check_interrupted()
                first = left.pop(0)  # shards are read in order: this one is likely to be at fault
                if is_alone:
                    self._encode_without_some(first, on_event)
                else:
                    self.encode([first], on_event)

    def _encode_or_retry(self, left: list[int], on_event: OnEvent) -> None:
        """Encode shards, and take away those that are done; twice, as the first death may be somebody else's fault."""
        try:
            self._encode(left, {}, on_event)
        except (Died, SessionError):
            check_interrupted()
            self._encode(left, {}, on_event)

    def _encode_without_some(self, number: int, on_event: OnEvent) -> None:
        """Encode a shard, without those of its texts that cannot be run."""
        found = self._find(number)
        if not found:
            raise SessionError(
                f"shard {number} ends the process that encodes it, and none of its texts does alone",
                "plan again with smaller batches: --batch_tokens, or run with fewer --threads",
            )
        for place, reason in found.items():
            on_event({"left_out": number, "place": place, "reason": reason})
        self._encode([number], {number: found}, on_event)

    def _encode(self, left: list[int], left_out: dict[int, dict[int, str]], on_event: OnEvent) -> None:
        texts = 0
        try:
            for answer in self._ask({"shards": left, "left_out": left_out}):
                if "shard" in answer:
                    left.remove(answer["shard"])
                    texts = 0
                texts += answer.get("batch", 0)
                on_event(answer)
        except (Died, SessionError):
            on_event({"batch": -texts})  # of shards that are not done
            raise

    def _find(self, number: int) -> dict[int, str]:
        """Return the places of texts of a shard that cannot be run, and why: each in a process of its own, twice."""
        found: dict[int, str] = {}
        begin, suspected = 0, -1
        while True:
            last = -1
            try:
                for answer in self._ask({"alone": number, "begin": begin}):
                    last = answer.get("text", last)
                    if "failed" in answer:
                        found[answer["failed"]] = f"cannot be encoded: {answer['reason']}"
                return found
            except Died as died:
                check_interrupted()
                is_second = last == suspected
                if last < 0:
                    raise SessionError(
                        f"the process that encodes shard {number} ends before it runs a text: {died}",
                        "run onnxtool infer with the model and a text",
                    ) from None
                begin, suspected = last, last
                if is_second:
                    found[last] = f"cannot be encoded: it ends the process ({died})"
                    begin, suspected = last + 1, -1

    def _ask(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answers to an order; see `WorkerProcess.ask`."""
        try:
            yield from self._process.ask(order)
        except Died:
            self.deaths += 1
            raise

    def stop(self) -> None:
        """Kill the process; a thread that waits for its answers gets an error."""
        self._process.stop()

    def close(self) -> None:
        """Kill the process, for whose answers no thread waits."""
        self._process.close()


class RemoteWorker:
    """A worker of another machine, to whose answers nobody listens while it encodes: an actor of Ray."""

    def __init__(self, options: WorkerOptions) -> None:
        self._worker = Worker(options)

    def encode(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Encode shards, and return all answers."""
        before = self._worker.deaths
        events: list[dict[str, Any]] = []
        self._worker.encode(numbers, events.append)
        return [*events, {"deaths": self._worker.deaths - before}]


def runs_of(missing: Sequence[int], workers: int) -> list[list[int]]:
    """Split shards into runs of some that follow each other: the first are long, and the last of one shard each.

    A packed file is unpacked from its beginning for each run, and workers should end at about the same time.
    """
    runs: list[list[int]] = []
    most = 0
    for place, number in enumerate(missing):
        if not runs or runs[-1][-1] != number - 1 or len(runs[-1]) == most:
            runs.append([])
            most = max(1, min(_MOST_OF_A_RUN, (len(missing) - place) // (2 * workers)))
        runs[-1].append(number)
    return runs
