"""Ray as an engine and as a pipeline, on one cluster of this machine: it takes ten seconds to start."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxtool.encoding import RunOptions
from onnxtool.encoding.encoder import EncodingTask
from onnxtool.encoding.ray import RayWorkers
from onnxtool.errors import InputError
from tests.encoding.corpora import (
    OPTIONS,
    SIZE,
    SPLIT,
    contents_of,
    dense_model,
    make_texts,
    whole,
    write_corpus,
)
from tests.encoding.poison import code_of, poisoned
from tests.encoding.test_encoder import EXAMPLES, require_means, write_texts
from tests.packages import need

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")
NO_LOGS = {"include_log_monitor": False}


class Nodes:
    """Stands in for Ray: the nodes of a cluster, and what is asked of them."""

    def __init__(self, *resources: dict[str, float]) -> None:
        self._nodes = [{"Alive": True, "Resources": one} for one in resources]
        self.asked: dict[str, Any] = {}

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def remote(self, _function: Any) -> Nodes:
        return self

    def options(self, **asked: Any) -> Any:
        self.asked = asked
        raise InterruptedError


@pytest.mark.parametrize(
    ("provider", "nodes", "workers", "asked"),
    [
        ("cpu", [{"CPU": 8.0}, {"CPU": 4.0}, {}], 2, (4, 0)),
        ("cpu", [{"CPU": 8.0, "GPU": 2.0}], 4, (2, 0)),
        ("cuda", [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 8.0}], 3, (8 / 3, 1)),
        ("cuda", [{"CPU": 8.0, "GPU": 1.0}], 2, (4, 0.5)),
    ],
)
def test_a_task_of_ray_gets_its_share_of_a_node_that_has_what_it_needs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    nodes: list[dict[str, float]],
    workers: int,
    asked: tuple[float, float],
) -> None:
    """And one GPU at most: Ray refuses shares above 1 that are no whole number, and a session runs on one."""
    task = EncodingTask(tmp_path, tmp_path, tmp_path, replace(OPTIONS, provider=provider))
    cluster = Nodes(*nodes)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    with pytest.raises(InterruptedError):
        RayWorkers(task, RunOptions(engine="ray", processes=workers), lambda _event: None)
    assert (cluster.asked["num_cpus"], cluster.asked["num_gpus"]) == pytest.approx(asked)
    monkeypatch.setitem(sys.modules, "ray", Nodes({"memory": 1.0}))
    with pytest.raises(InputError, match="no node of the cluster has a CPU"):
        RayWorkers(replace(task, options=OPTIONS), RunOptions(engine="ray"), lambda _event: None)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A node with two cores on paper, to which this process is connected; one that is lost is seen in two seconds.

    Its workers wait a while for each batch that has a text called `poison`.
    """
    ray = need("ray")
    from ray.cluster_utils import Cluster

    checks = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    # Workers start when they are asked for: as many as a node has cores would import Ray at its start.
    settings = {**checks, "prestart_worker_first_driver": False}
    # Each of Ray's services is a process that imports Ray: none is for scaling, nor for the workers' logs.
    head = {"num_cpus": 2, "include_dashboard": False, "no_monitor": True, **NO_LOGS, "_system_config": settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in poisoned(tmp_path_factory.mktemp("code"), code_of("time.sleep(0.3)")).items():
            patch.setenv(name, value)
        started = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=started.address, log_to_driver=False)
        yield started
        ray.shutdown()
        started.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray by itself
def test_an_actor_pool_of_ray_data_encodes(tmp_path: Path, cluster: Any) -> None:
    """By the script of the recipe."""
    pytest.importorskip("pandas", reason="Ray Data needs pandas")
    need("ray.data")
    del cluster
    script = runpy.run_path(str(EXAMPLES / "ray_encode.py"))
    script["encode"](str(dense_model(tmp_path)), str(write_texts(tmp_path)), str(tmp_path / "vectors"), 1)
    require_means(tmp_path / "vectors")


@pytest.mark.slow
def test_a_node_that_is_lost_and_never_comes_back_is_done_without(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its splits go to the nodes that are left, and the bytes are those of one run."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(150))
    corpus.write_text(corpus.read_text().replace('"id": "d', '"id": "poison'))
    node = cluster.add_node(num_cpus=2, **NO_LOGS)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    options = ["--provider", "cpu", "--shard_size", str(SIZE), "--split_bytes", str(SPLIT), "--engine", "ray"]
    places = ["--model_path", str(model), "--input", str(corpus), "--output", str(tmp_path / "vectors")]
    command = [sys.executable, "-m", "onnxtool", "encode", "run", *places, *options]
    with subprocess.Popen([*command, "--format", "json"], stdout=subprocess.PIPE, text=True) as driver:
        while driver.poll() is None and len(list(tmp_path.glob("vectors.parts/*"))) < 3:
            time.sleep(0.05)
        assert driver.poll() is None
        cluster.remove_node(node, allow_graceful=False)
        answer, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0
    report = json.loads(answer)
    assert (report["engine"], report["processes"], report["num_texts"]) == ("ray", 2, 150)
    assert contents_of(tmp_path / "vectors") == whole(tmp_path, model, corpus)
