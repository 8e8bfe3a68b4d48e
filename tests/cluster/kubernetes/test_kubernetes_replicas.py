"""One patch at a time: guarded, by index, whole or not at all, and never over somebody's edit."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from control_plane.cluster.kubernetes_replicas import RayClusterReplicas
from hocket.errors import ApiUnavailable, ConfigError, HocketError, ResizeRefused
from tests.cluster.kubernetes.api_server import ApiServer
from tests.cluster.kubernetes.kuberay import NAME, ray_cluster
from tests.cluster.kubernetes.rig import CLUSTER, api_of

Group = dict[str, Any]


def no_wait(seconds: float) -> None:
    pass


@pytest.fixture
def replicas(server: ApiServer) -> RayClusterReplicas:
    server.put("rayclusters", ray_cluster(prefill=1, decode=2))
    for name, group in (("p-1", "prefill"), ("d-1", "decode"), ("d-2", "decode")):
        put_pod(server, name, group)
    return RayClusterReplicas(api_of(server, timeout_s=0.5), CLUSTER, wait=no_wait)


def put_pod(server: ApiServer, name: str, group: str, **labels: str) -> None:
    labels |= {"ray.io/cluster": NAME, "ray.io/group": group}
    server.put(
        "pods",
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "serving", "labels": labels},
            "spec": {"containers": [{"name": "ray", "image": "hocket"}]},
            "status": {"phase": "Running"},
        },
    )


def decode_of(server: ApiServer) -> Group:
    groups = server.get("rayclusters", NAME)["spec"]["workerGroupSpecs"]
    return next(group for group in groups if group["groupName"] == "decode")


def change_group(server: ApiServer, **values: Any) -> Callable[[], None]:
    """An edit of the decode group, to be run once."""

    def change(cluster: dict[str, Any]) -> None:
        groups = cluster["spec"]["workerGroupSpecs"]
        next(g for g in groups if g["groupName"] == "decode").update(values)

    def hook() -> None:
        server.before_write.clear()
        server.edit("rayclusters", NAME, change)

    return hook


def touch_status(server: ApiServer) -> None:
    """What KubeRay does all the time."""
    status = {"reason": f"{len(server.calls)}"}
    server.edit("rayclusters", NAME, lambda cluster: cluster.update(status=status))


def test_a_group_is_read_as_it_is(server: ApiServer, replicas: RayClusterReplicas) -> None:
    decode = replicas.read()["decode"]
    assert (decode.replicas, decode.min_replicas, decode.max_replicas) == (2, 0, 8)
    assert decode.resources == {"CPU": 4.0}
    assert [pod.name for pod in decode.pods] == ["d-1", "d-2"]


def test_names_are_taken_back_but_of_pods_that_terminate(
    server: ApiServer, replicas: RayClusterReplicas
) -> None:
    def end(pod: dict[str, Any]) -> None:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    server.edit("pods", "d-2", end)
    change_group(server, scaleStrategy={"workersToDelete": ["d-0", "d-1", "d-2"]})()
    replicas.resize("decode", 3, expected=2, staying=["d-1", "d-2"])
    # Without its name, a KubeRay that was restarted would take another pod for d-2.
    assert decode_of(server)["scaleStrategy"] == {"workersToDelete": ["d-2"]}
    assert decode_of(server)["replicas"] == 3
    server.delete("pods", "d-2")
    replicas.resize("decode", 4, expected=3)
    assert decode_of(server)["scaleStrategy"] == {"workersToDelete": []}


def test_shrinking_lowers_replicas_and_names_the_pods_in_one_write(
    server: ApiServer, replicas: RayClusterReplicas
) -> None:
    replicas.resize("decode", 1, expected=2, leaving=["d-1"])
    assert server.calls.count("patch rayclusters") == 1
    assert decode_of(server)["replicas"] == 1
    assert decode_of(server)["scaleStrategy"] == {"workersToDelete": ["d-1"]}
    put_pod(server, "d-3", "decode")
    replicas.resize("decode", 0, expected=1, leaving=["d-2"])
    assert decode_of(server)["scaleStrategy"] == {"workersToDelete": ["d-1", "d-2"]}


def test_the_same_size_again_is_not_written(
    server: ApiServer, replicas: RayClusterReplicas
) -> None:
    replicas.resize("decode", 2, expected=2)
    assert "patch rayclusters" not in server.calls


@pytest.mark.parametrize(("asked", "written"), [(99, 8), (-3, 0), (5, 5)])
def test_sizes_are_kept_within_the_groups_limits(
    server: ApiServer, replicas: RayClusterReplicas, asked: int, written: int
) -> None:
    replicas.resize("decode", asked, expected=2)
    assert decode_of(server)["replicas"] == written


def test_an_edit_between_read_and_write_is_not_overwritten(
    server: ApiServer, replicas: RayClusterReplicas
) -> None:
    server.before_write.append(change_group(server, replicas=5))
    with pytest.raises(ResizeRefused, match="has 5 replicas, not 2: somebody else"):
        replicas.resize("decode", 3, expected=2)
    assert decode_of(server)["replicas"] == 5


def test_a_status_update_in_between_is_no_reason_to_give_up(
    server: ApiServer, replicas: RayClusterReplicas
) -> None:
    def touch() -> None:
        if server.calls.count("patch rayclusters") < 4:
            touch_status(server)

    server.before_write.append(touch)
    replicas.resize("decode", 3, expected=2)
    assert decode_of(server)["replicas"] == 3
    assert server.calls.count("patch rayclusters") == 4


def test_an_object_that_never_rests_is_given_up(
    server: ApiServer, replicas: RayClusterReplicas
) -> None:
    server.before_write.append(lambda: touch_status(server))
    with pytest.raises(ResizeRefused, match="was not resized in 6 tries"):
        replicas.resize("decode", 3, expected=2)
    assert decode_of(server)["replicas"] == 2


def test_groups_that_change_places_keep_their_sizes(
    server: ApiServer, replicas: RayClusterReplicas
) -> None:
    """A helm upgrade in between: the index that was read belongs to another group now."""

    def swap() -> None:
        server.before_write.clear()
        server.edit("rayclusters", NAME, lambda c: c["spec"]["workerGroupSpecs"].reverse())

    server.before_write.append(swap)
    replicas.resize("decode", 3, expected=2)
    groups = server.get("rayclusters", NAME)["spec"]["workerGroupSpecs"]
    assert {g["groupName"]: g["replicas"] for g in groups} == {
        "gateway": 1,
        "prefill": 1,
        "decode": 3,
    }


def test_a_named_pod_that_is_gone_already_is_not_paid_for_by_another(
    server: ApiServer, replicas: RayClusterReplicas
) -> None:
    with pytest.raises(ResizeRefused, match=r"are gone already: \['d-9'\]"):
        replicas.resize("decode", 1, expected=2, leaving=["d-9"])
    assert decode_of(server)["replicas"] == 2


RULES: list[Group] = [
    {
        "apiGroups": ["ray.io"],
        "resources": ["rayclusters"],
        "resourceNames": [NAME],
        "verbs": ["get", "patch"],
    },
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (RULES[:1], r'list Pods serving/of hocket: 403 .*apiGroups \[""\], resources \[pods\]'),
        (RULES[1:], r"get RayCluster serving/hocket: 403 .*resources \[rayclusters\], verbs \[get"),
        (
            [{**RULES[0], "verbs": ["get"]}, RULES[1]],
            r'patch .*: 403 .*\["ray.io"\], resources \[rayclusters\], verbs \[patch\]',
        ),
        ([{**RULES[0], "resourceNames": ["other"]}, RULES[1]], "403"),
    ],
)
def test_a_missing_right_is_named(
    server: ApiServer, replicas: RayClusterReplicas, rules: list[Group], words: str
) -> None:
    server.rules = rules
    with pytest.raises(ConfigError, match=words):
        replicas.resize("decode", 3, expected=2)


def test_two_rules_are_enough(server: ApiServer, replicas: RayClusterReplicas) -> None:
    server.rules = RULES
    replicas.resize("decode", 3, expected=2)
    assert decode_of(server)["replicas"] == 3


def test_what_is_not_there_is_named(server: ApiServer, replicas: RayClusterReplicas) -> None:
    with pytest.raises(ConfigError, match="has no worker group 'encode'"):
        replicas.resize("encode", 1, expected=1)
    server.delete("rayclusters", NAME)
    with pytest.raises(ConfigError, match="get RayCluster serving/hocket: 404"):
        replicas.read()


@pytest.mark.parametrize("trouble", ["slow", "busy", "down"])
def test_no_answer_says_what_was_asked(
    server: ApiServer, replicas: RayClusterReplicas, trouble: str
) -> None:
    if trouble == "slow":
        server.answer_after_s = 2.0
    elif trouble == "busy":
        server.fails_with = 503
    else:
        server.close()
    with pytest.raises(ApiUnavailable, match="list Pods serving/of hocket: ") as caught:
        replicas.read()
    assert caught.value.is_retryable


def test_a_lost_answer_is_not_taken_for_a_failure_nor_sent_twice(
    server: ApiServer, replicas: RayClusterReplicas
) -> None:
    server.lose_answers = 1
    with pytest.raises(ApiUnavailable, match="patch RayCluster"):
        replicas.resize("decode", 3, expected=2)
    assert server.calls.count("patch rayclusters") == 1
    assert decode_of(server)["replicas"] == 3


def _patch(server: ApiServer, content_type: str, body: Any) -> int:
    """The status of an answer, without any client in between."""
    request = urllib.request.Request(
        f"{server.url}/apis/ray.io/v1/namespaces/serving/rayclusters/{NAME}?fieldValidation=Strict",
        json.dumps(body).encode(),
        {"Content-Type": content_type},
        method="PATCH",
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_server_of_these_tests_refuses_as_a_real_one_does(
    server: ApiServer, replicas: RayClusterReplicas, schema_check: object
) -> None:
    """Statuses as a real API server gave them."""
    path = "/spec/workerGroupSpecs/2"
    json_patch, merge_patch = "application/json-patch+json", "application/merge-patch+json"
    failing = [{"op": "test", "path": f"{path}/groupName", "value": "prefill"}]
    assert _patch(server, json_patch, failing) == 422
    stale = {"metadata": {"resourceVersion": "1"}, "spec": {"rayVersion": "9"}}
    server.put("rayclusters", {**ray_cluster(), "status": {}})
    assert _patch(server, merge_patch, stale) == 409
    if schema_check is None:
        pytest.skip("shared/data/crds is not there: fields and types are not checked")
    unknown = [{"op": "add", "path": f"{path}/replicaz", "value": 1}]
    assert _patch(server, json_patch, unknown) == 400
    wrong = [{"op": "add", "path": f"{path}/replicas", "value": "three"}]
    assert _patch(server, json_patch, wrong) == 422


def test_what_the_schema_refuses_is_said_in_its_words(
    server: ApiServer, replicas: RayClusterReplicas, schema_check: object
) -> None:
    if schema_check is None:
        pytest.skip("shared/data/crds is not there: fields and types are not checked")
    patch = [{"op": "add", "path": "/spec/workerGroupSpecs/2/replicas", "value": "three"}]
    with pytest.raises(HocketError, match=r"422 .* 'three' is not of type 'integer'"):
        api_of(server).patch_ray_cluster(CLUSTER, patch)
    assert decode_of(server)["replicas"] == 2
