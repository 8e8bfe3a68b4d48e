"""The chart and the autoscaler in it: limits, shapes of replicas, and that its rights are enough.

The last is tried: Hocket's own executor, with the configuration, the RayCluster, the Lease and the
Role that real Helm rendered, against an API server that knows them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cluster.kubernetes_cluster import KubernetesCluster
from control_plane.cluster.pools import WorkerPools
from control_plane.cluster.supervisor import Supervisor
from hocket.clock import ManualClock
from hocket.environment import RayClusterPod
from hocket.types import Role
from tests.cluster.kubernetes.api_server import ApiServer
from tests.cluster.kubernetes.kuberay import KubeRay
from tests.cluster.kubernetes.pods_host import PodsHost
from tests.cluster.kubernetes.rig import TIMES, api_of
from tests.deploy.rendering import POOLS, VALUES, Document, Helm, config_of, group_of, the

SCALED = (
    *("--set", "autoscaling.enabled=true"),
    *("--set-json", "config.autoscaler.ttft_s=0.5"),
    *("--set", "decode.minReplicas=2,decode.replicas=3,decode.maxReplicas=6"),
    *("--set", "decode.cpus=4,decode.processesPerPod=2"),
)


def test_limits_and_targets_reach_the_autoscaler_in_workers(helm: Helm, tmp_path: Path) -> None:
    config = config_of(helm.template(*SCALED), tmp_path)
    scaler = config.autoscaler
    assert (scaler.enabled, scaler.ttft_s) == (True, 0.5)
    assert (scaler.prefill.min_workers, scaler.prefill.max_workers) == (1, 4)
    assert (scaler.decode.min_workers, scaler.decode.max_workers) == (4, 12)
    assert config.decode.workers == 6


def test_without_autoscaling_nobody_asks_for_pods_that_never_come(
    helm: Helm, tmp_path: Path
) -> None:
    documents = helm.template("--set", "decode.replicas=3")
    config = config_of(documents, tmp_path)
    assert not config.autoscaler.enabled
    # An operator's size is kept to it, too.
    assert config.autoscaler.decode.max_workers == 3
    assert not [d for d in documents if d["kind"] == "Lease"]


@pytest.mark.parametrize(
    ("ranks", "per_pod", "pods", "workers", "together"),
    [
        (1, 4, 1, 4, ""),
        (2, 4, 1, 2, "ray.io/node-id"),
        (4, 4, 1, 1, "ray.io/node-id"),
        (64, 4, 16, 1, "hocket.replica"),
    ],
)
def test_a_replica_holds_whole_workers(
    helm: Helm, tmp_path: Path, ranks: int, per_pod: int, pods: int, workers: int, together: str
) -> None:
    documents = helm.template(
        *("--set", f"config.decode.group_size={ranks},decode.processesPerPod={per_pod}"),
        *("--set", "decode.cpus=8,decode.gpus=4,decode.replicas=2"),
    )
    config, cluster = config_of(documents, tmp_path), the(documents, "RayCluster")
    assert group_of(cluster, "decode")["numOfHosts"] == pods
    assert group_of(cluster, "prefill")["numOfHosts"] == 1
    assert config.decode.workers == 2 * workers
    placement = config.decode.placement
    assert (placement.num_cpus, placement.num_gpus) == (2.0, 1.0)
    assert placement.together == together
    assert config.prefill.placement.together == ""


def test_pods_of_one_replica_are_told_apart_from_others_in_ray(helm: Helm) -> None:
    """KubeRay labels the pods of a replica; Ray reads labels from this variable, and Kubernetes
    puts in the value of one that stands before."""
    rendered = helm.template(*VALUES["gb200"], "--set-json", 'decode.env=[{"name":"X"}]')
    cluster = the(rendered, "RayCluster")
    (container,) = group_of(cluster, "decode")["template"]["spec"]["containers"]
    names = [variable["name"] for variable in container["env"]]
    assert names.index("HOCKET_REPLICA") < names.index("RAY_OVERRIDE_LABELS") < names.index("X")
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["RAY_OVERRIDE_LABELS"]["value"] == '{"hocket.replica": "$(HOCKET_REPLICA)"}'
    assert variables["HOCKET_REPLICA"]["valueFrom"]["fieldRef"]["fieldPath"] == (
        "metadata.labels['ray.io/worker-group-replica-name']"
    )
    (other,) = group_of(cluster, "prefill")["template"]["spec"]["containers"]
    assert "HOCKET_REPLICA" not in {variable["name"] for variable in other["env"]}


def test_a_pod_that_goes_is_left_by_ray_at_once(rendered: dict[str, list[Document]]) -> None:
    """Otherwise Ray might place a worker on a pod that terminates."""
    cluster = the(rendered["default"], "RayCluster")
    for role in POOLS:
        (container,) = group_of(cluster, role)["template"]["spec"]["containers"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["ray", "stop"]
    (gateway,) = group_of(cluster, "gateway")["template"]["spec"]["containers"]
    assert "lifecycle" not in gateway


@pytest.fixture
def server() -> Iterator[ApiServer]:
    made = ApiServer()
    yield made
    made.close()


def test_the_charts_own_rights_are_enough_to_scale(
    helm: Helm, server: ApiServer, tmp_path: Path
) -> None:
    documents = helm.template(*SCALED)
    config = config_of(documents, tmp_path)
    for resource, kind in (("rayclusters", "RayCluster"), ("leases", "Lease")):
        body = the(documents, kind)
        body["metadata"]["namespace"] = "serving"
        server.put(resource, body)
    kuberay, clock = KubeRay(server, rng=random.Random(0)), ManualClock()
    kuberay.reconcile()
    host, supervisor = PodsHost(kuberay, places=2), Supervisor([], clock)
    pools = WorkerPools(host, supervisor, TIMES, clock)
    server.rules = the(documents, "Role", "hocket")["rules"]
    cluster = KubernetesCluster(
        api_of(server), RayClusterPod("hocket", "serving", "hocket-gateway-worker-0"), config
    )
    executor = cluster.executor(pools)
    for size, pods in ((11, 6), (5, 3), (1, 2)):
        executor.resize(Role.DECODE, size)
        for _ in range(12):
            clock.advance(1)
            supervisor.tick()
            pools.tick()
            executor.tick()
            kuberay.reconcile()
        assert executor.workers(Role.DECODE).ready == size
        # minReplicas stays, whatever the size.
        assert len(kuberay.pods("decode")) == pods
    assert (host.lost, kuberay.taken_at_will) == ([], [])
    cluster.close()
    assert the([server.get("leases", "hocket-autoscaler")], "Lease")["spec"]["holderIdentity"] == ""
