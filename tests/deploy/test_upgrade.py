"""`helm upgrade` and the autoscaler: the chart writes the sizes it finds in the cluster.

Helm asks a small API server that holds one RayCluster; it is Helm's own `lookup` that reads it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.rendering import CHART, Document, Helm, documents, group_of, the

NOT_FOUND = {
    "kind": "Status",
    "apiVersion": "v1",
    "status": "Failure",
    "reason": "NotFound",
    "code": 404,
}
RAY_CLUSTERS = "/apis/ray.io/v1/namespaces/serving/rayclusters/"


# Plural names of the kinds that the chart renders, by their group and version.
KINDS = {
    "v1": ("serviceaccounts", "configmaps", "services"),
    "apps/v1": ("statefulsets",),
    "rbac.authorization.k8s.io/v1": ("roles", "rolebindings"),
    "networking.k8s.io/v1": ("networkpolicies",),
    "coordination.k8s.io/v1": ("leases",),
    "ray.io/v1": ("rayclusters",),
}
SINGULAR = {
    "serviceaccounts": "ServiceAccount",
    "configmaps": "ConfigMap",
    "services": "Service",
    "statefulsets": "StatefulSet",
    "roles": "Role",
    "rolebindings": "RoleBinding",
    "networkpolicies": "NetworkPolicy",
    "leases": "Lease",
    "rayclusters": "RayCluster",
}


def _discovery() -> dict[str, Document]:
    """What a client asks first: which groups, versions and kinds there are."""
    groups: list[Document] = []
    answers: dict[str, Document] = {
        "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for group_version, names in KINDS.items():
        group, _, version = group_version.rpartition("/")
        if group:
            entry = {"groupVersion": group_version, "version": version}
            groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
        resources = [
            {"name": name, "kind": SINGULAR[name], "namespaced": True, "verbs": ["get"]}
            for name in names
        ]
        answers[f"/apis/{group_version}" if group else "/api/v1"] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group_version,
            "resources": resources,
        }
    return answers


class Cluster:
    """An API server that answers GETs from `answers`; everything else is 404."""

    def __init__(self, folder: Path) -> None:
        answers = self.answers = _discovery()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = answers.get(self.path.partition("?")[0])
                status = 200 if answer is not None else 404
                if answer is None:
                    answer = {
                        "kind": "Status",
                        "apiVersion": "v1",
                        "code": 404,
                        "status": "Failure",
                    }
                    answer["reason"] = "NotFound"
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "x",
                    "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
                    "users": [{"name": "x", "user": {}}],
                    "clusters": [
                        {
                            "name": "x",
                            "cluster": {
                                "server": f"http://127.0.0.1:{self.server.server_address[1]}"
                            },
                        }
                    ],
                }
            )
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def holds(self, **replicas: int) -> Document:
        """From now on, a RayCluster with these group sizes is there; it may be changed."""
        groups = [{"groupName": name, "replicas": size} for name, size in replicas.items()]
        cluster: Document = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {"name": "hocket", "namespace": "serving"},
            "spec": {"workerGroupSpecs": groups},
        }
        self.answers[RAY_CLUSTERS + "hocket"] = cluster
        return cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def upgraded(helm: Helm, cluster: Cluster) -> Callable[..., list[Document]]:
    """What an upgrade with these settings would write."""

    def upgrade(*settings: str) -> list[Document]:
        done = helm(
            *("template", "hocket", str(CHART), "-n", "serving", "--is-upgrade"),
            *("--dry-run=server", "--disable-openapi-validation"),
            *("--kubeconfig", str(cluster.kubeconfig)),
            *(part for setting in settings for part in ("--set", setting)),
        )
        assert done.returncode == 0, done.stderr
        return documents(done.stdout)

    return upgrade


def test_upgrade_keeps_the_sizes_that_the_autoscaler_chose(
    cluster: Cluster, upgraded: Callable[..., list[Document]]
) -> None:
    cluster.holds(gateway=1, prefill=3, decode=2)
    written = the(upgraded("autoscaling.enabled=true"), "RayCluster")
    sizes = {g["groupName"]: g["replicas"] for g in written["spec"]["workerGroupSpecs"]}
    assert sizes == {"gateway": 1, "prefill": 3, "decode": 2}


def test_upgrade_brings_sizes_within_new_limits(
    cluster: Cluster, upgraded: Callable[..., list[Document]]
) -> None:
    cluster.holds(prefill=8, decode=1)
    written = the(
        upgraded("autoscaling.enabled=true", "decode.minReplicas=2", "decode.replicas=2"),
        "RayCluster",
    )
    assert group_of(written, "prefill")["replicas"] == 4
    assert group_of(written, "decode")["replicas"] == 2


def test_upgrade_keeps_the_pods_that_were_chosen_to_go(
    cluster: Cluster, upgraded: Callable[..., list[Document]]
) -> None:
    chosen = {"workersToDelete": ["hocket-decode-worker-x"]}
    live = cluster.holds(prefill=1, decode=1)
    live["spec"]["workerGroupSpecs"][1]["scaleStrategy"] = chosen
    written = the(upgraded("autoscaling.enabled=true"), "RayCluster")
    assert group_of(written, "decode")["scaleStrategy"] == chosen
    assert "scaleStrategy" not in group_of(written, "prefill")


def test_without_autoscaling_the_written_sizes_count(
    cluster: Cluster, upgraded: Callable[..., list[Document]]
) -> None:
    cluster.holds(prefill=3, decode=3)
    written = the(upgraded("prefill.replicas=2"), "RayCluster")
    assert group_of(written, "prefill")["replicas"] == 2
    assert group_of(written, "decode")["replicas"] == 1


def test_first_install_has_the_written_sizes(upgraded: Callable[..., list[Document]]) -> None:
    written = the(upgraded("autoscaling.enabled=true", "prefill.replicas=2"), "RayCluster")
    assert group_of(written, "prefill")["replicas"] == 2
    assert group_of(written, "prefill")["maxReplicas"] == 4


def test_a_resize_does_not_change_the_configuration(
    cluster: Cluster, upgraded: Callable[..., list[Document]]
) -> None:
    """Otherwise every upgrade after a resize would restart Hocket."""
    texts: list[str] = []
    for size in (1, 3):
        cluster.holds(prefill=size, decode=size)
        written = upgraded("autoscaling.enabled=true")
        texts.append(the(written, "ConfigMap")["data"]["hocket.toml"])
    assert texts[0] == texts[1]
