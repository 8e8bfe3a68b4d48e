"""Where real Ray puts the ranks of a worker whose replica is several pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from control_plane.cluster.ray_workers import RayReservation
from hocket import environment
from hocket.config import PlacementSettings

pytestmark = pytest.mark.e2e


@pytest.fixture
def replicas() -> Iterator[None]:
    """Replica "a" has three places on one pod, "b" two on each of two: a worker of four ranks fits
    "b" alone, and whoever only packs begins with the larger pod of "a"."""
    environment.prepare_ray()
    import ray
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": 80 * 2**20}
    cluster = Cluster()
    for name, cpus in (("a", 3), ("b", 2), ("b", 2)):
        labels = {"hocket.pool": "decode", "hocket.replica": name}
        cluster.add_node(num_cpus=cpus, labels=labels, include_dashboard=False, **common)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_ranks_stay_within_one_replica(replicas: None) -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    placement = PlacementSettings(
        num_cpus=1, labels={"hocket.pool": "decode"}, together="hocket.replica"
    )
    first, second = RayReservation(placement, 4), RayReservation(placement, 4)
    assert first.group.wait(30)
    replica_of = {node["NodeID"]: node["Labels"]["hocket.replica"] for node in ray.nodes()}
    on = placement_group_table(first.group)["bundles_to_node_id"].values()
    assert [replica_of[node] for node in on] == ["b"] * 4
    # There are three more places.
    assert not second.group.wait(1)
    first.release()
    assert second.group.wait(30)
    second.release()
