"""Real Ray, real workers, and pods that are Ray nodes: sizes as replicas, under requests.

What is not real: the API server is a small one in this process, and KubeRay's and the kubelet's
parts are played by the test, which starts and kills a raylet for each pod.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.cluster.cluster import Cluster
from control_plane.cluster.embedded_store import StoreProcess, store_url
from control_plane.cluster.kubernetes_api import KubernetesApi
from control_plane.cluster.scaling_store import ScalingStatus, ScalingStore
from hocket import environment
from hocket.config import RedisSettings, load_config
from hocket.types import Role
from tests.cluster.kubernetes.api_server import ApiServer
from tests.cluster.kubernetes.kuberay import NAME, NAMESPACE, KubeRay, ray_cluster
from tests.cluster.kubernetes.rig import api_of, empty_lease
from tests.end_to_end.running_cluster import OVERRIDES, Case, Running
from tests.end_to_end.test_scaling import Traffic

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CASE = Case(tuple(range(3, 40)), 30)
_RAY: dict[str, Any] = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


class Nodes:
    """A Ray cluster whose nodes, but for the head, are pods: each has its pod's address."""

    def __init__(self, kuberay: KubeRay, folder: Path) -> None:
        """`folder` is for Ray's files."""
        environment.prepare_ray()
        from ray.cluster_utils import Cluster as RayCluster

        self._ray = RayCluster()
        self._options = {**_RAY, "temp_dir": str(folder)}
        self._ray.add_node(num_cpus=1, node_ip_address="127.0.0.1", **self._options)
        self._nodes: dict[str, Any] = {}
        kuberay.on_run, kuberay.on_kill = self._run, self._kill
        self.address: str = self._ray.address

    def _run(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        group = metadata["labels"]["ray.io/group"]
        if group != "gateway":
            self._nodes[metadata["name"]] = self._ray.add_node(
                num_cpus=4,
                node_ip_address=pod["status"]["podIP"],
                labels={"hocket.pool": group},
                **self._options,
            )

    def _kill(self, pod: dict[str, Any]) -> None:
        if node := self._nodes.pop(pod["metadata"]["name"], None):
            self._ray.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._ray.shutdown()


class World:
    """Everything but Hocket."""

    def __init__(self, folder: Path) -> None:
        self.server = ApiServer()
        self.server.put("rayclusters", ray_cluster())
        self.server.put("leases", empty_lease())
        self.kuberay = KubeRay(self.server, rng=random.Random(0))
        self.nodes = Nodes(self.kuberay, folder)
        self.store = StoreProcess(folder)
        self.url = store_url(folder)
        self.kuberay.reconcile()

    def group(self) -> tuple[int, int]:
        """Replicas and pods of the decode group."""
        groups = self.server.get("rayclusters", NAME)["spec"]["workerGroupSpecs"]
        replicas = next(g["replicas"] for g in groups if g["groupName"] == "decode")
        return replicas, len(self.kuberay.pods("decode"))

    def set_replicas(self, replicas: int) -> None:
        """`kubectl patch`."""

        def change(cluster: dict[str, Any]) -> None:
            for group in cluster["spec"]["workerGroupSpecs"]:
                if group["groupName"] == "decode":
                    group["replicas"] = replicas

        self.server.edit("rayclusters", NAME, change)

    def close(self) -> None:
        self.nodes.close()
        self.store.kill()
        self.server.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="hk-", dir="/tmp") as folder:
        made = World(Path(folder))
        token = Path(folder) / "token"
        token.write_text("x")
        monkeypatch.setattr(environment, "_KUBERNETES_TOKEN", token)
        monkeypatch.setenv("RAY_CLUSTER_NAME", NAME)
        monkeypatch.setenv("RAY_CLUSTER_NAMESPACE", NAMESPACE)
        monkeypatch.setattr(KubernetesApi, "in_cluster", lambda: api_of(made.server))
        yield made
        made.close()


@pytest.fixture
def up(world: World) -> Iterator[Running]:
    pools = [
        f"{role}.placement.{key}"
        for role in ("prefill", "decode")
        for key in ("num_cpus=4", f'labels={{"hocket.pool"="{role}"}}', "together=ray.io/node-id")
    ]
    config = load_config(
        None,
        [
            *OVERRIDES,
            *pools,
            "prefill.threads=1",
            "decode.threads=1",
            f"cluster.ray_address={world.nodes.address}",
            f"redis.url={world.url}",
        ],
    )
    cluster = Cluster(config, lambda text: None)
    try:
        yield Running(cluster, cluster.start(), config)
    finally:
        cluster.stop()


def test_replicas_and_workers_follow_each_other_and_no_request_fails(
    world: World, up: Running
) -> None:
    store = ScalingStore(RedisSettings(url=world.url))
    traffic = Traffic(up, [CASE, CASE])
    store.set_sizes({Role.DECODE: 2})
    _wait(world, store, lambda status: status.decode.ready == 2)
    assert world.group() == (2, 2)
    seen = traffic.num_answers
    store.set_sizes({Role.DECODE: 1})
    _wait(world, store, lambda status: status.decode.draining == 0 and world.group() == (1, 1))
    world.set_replicas(2)
    _wait(world, store, lambda status: status.decode.ready == status.decode.size == 2)
    assert world.group() == (2, 2)
    traffic.stop()
    store.close()
    assert traffic.num_answers > seen
    assert world.kuberay.taken_at_will == []


def _wait(
    world: World,
    store: ScalingStore,
    is_so: Callable[[ScalingStatus], bool],
    timeout_s: float = 90,
) -> None:
    """KubeRay looks and acts meanwhile: Ray starts nodes from the main thread only."""
    deadline = time.monotonic() + timeout_s
    while True:
        world.kuberay.reconcile()
        status = store.status()
        if status is not None and is_so(status):
            return
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {status}"
        time.sleep(0.2)
