"""What pods may do: rights, tokens, capabilities, and whom the network lets them talk to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.deploy.rendering import POOLS, VALUES, Document, Helm, config_of, pod_specs, the


@pytest.mark.parametrize("values", VALUES)
def test_pods_have_no_rights_they_do_not_use(
    rendered: dict[str, list[Document]], values: str
) -> None:
    for name, pod in pod_specs(rendered[values]).items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        # Only what talks to the API server has a token: here, the job that runs at uninstall.
        assert pod["automountServiceAccountToken"] is (name == "hocket-uninstall"), name
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"]["drop"] == ["ALL"], name
            added = security["capabilities"].get("add", [])
            assert added == (["IPC_LOCK"] if values == "gb200" and name in POOLS else []), name


def test_rights_are_the_autoscalers_and_no_more(helm: Helm) -> None:
    documents = helm.template("--set", "autoscaling.enabled=true")
    assert the(documents, "Role", "hocket")["rules"] == [
        {
            "apiGroups": ["ray.io"],
            "resources": ["rayclusters"],
            "resourceNames": ["hocket"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": ["hocket-autoscaler"],
            "verbs": ["get", "update"],
        },
    ]
    assert the(documents, "Lease", "hocket-autoscaler")["apiVersion"] == "coordination.k8s.io/v1"
    tokens = {n: p["automountServiceAccountToken"] for n, p in pod_specs(documents).items()}
    assert {name for name, has_token in tokens.items() if has_token} == {
        "gateway",
        "hocket-uninstall",
    }
    assert not [d for d in documents if d["kind"].startswith("ClusterRole")]


@pytest.mark.parametrize("values", VALUES)
def test_no_pod_escapes_the_default_deny(rendered: dict[str, list[Document]], values: str) -> None:
    documents = rendered[values]
    deny = the(documents, "NetworkPolicy", "hocket-deny")["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & deny.keys()
    wanted = deny["podSelector"]["matchLabels"].items()
    cluster = the(documents, "RayCluster")["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    stores = [d["spec"] for d in documents if d["kind"] == "StatefulSet"]
    for template in [part["template"] for part in (*groups, *stores)]:
        assert wanted <= template["metadata"]["labels"].items()


def test_a_closed_door_is_closed_everywhere(helm: Helm, tmp_path: Path) -> None:
    documents = helm.template("--set", "gateway.httpPort=0,gateway.metricsPort=0")
    config = config_of(documents, tmp_path)
    assert (config.gateway.http_port, config.telemetry.metrics_port) == (-1, -1)
    ports = the(documents, "Service", "hocket-gateway")["spec"]["ports"]
    assert [port["port"] for port in ports] == [50051]
    (rule,) = the(documents, "NetworkPolicy", "hocket-gateway")["spec"]["ingress"]
    assert rule == {"ports": [{"protocol": "TCP", "port": 50051}]}


def test_the_operators_door_stays_inside_its_pod(helm: Helm, tmp_path: Path) -> None:
    """`kubectl exec` and `port-forward` reach it there; nobody else may resize the pools."""
    documents = helm.template()
    config = config_of(documents, tmp_path)
    assert (config.gateway.admin_host, config.gateway.admin_port) == ("127.0.0.1", 50052)
    service = the(documents, "Service", "hocket-gateway")["spec"]
    assert 50052 not in [port["port"] for port in service["ports"]]


def test_only_named_peers_reach_the_gateway(helm: Helm) -> None:
    clients, monitoring = [{"podSelector": {}}], [{"namespaceSelector": {}}]
    documents = helm.template(
        *("--set-json", f"networkPolicy.clients={json.dumps(clients)}"),
        *("--set-json", f"networkPolicy.monitoring={json.dumps(monitoring)}"),
    )
    doors, metrics = the(documents, "NetworkPolicy", "hocket-gateway")["spec"]["ingress"]
    assert doors["from"] == clients
    assert [port["port"] for port in doors["ports"]] == [50051, 8000]
    assert metrics == {"from": monitoring, "ports": [{"protocol": "TCP", "port": 9090}]}


def test_fixed_ports_of_ray_are_pairwise_different_and_allowed(
    rendered: dict[str, list[Document]],
) -> None:
    documents = rendered["default"]
    policy = the(documents, "NetworkPolicy", "hocket-ray")["spec"]
    (between,) = policy["ingress"]
    assert policy["egress"][0]["ports"] == between["ports"]
    ranges = [(rule["port"], rule.get("endPort", rule["port"])) for rule in between["ports"]]
    fixed = [6379, 8265, 52365]
    for name, port in the(documents, "RayCluster")["spec"]["headGroupSpec"][
        "rayStartParams"
    ].items():
        if name.endswith("-port") and name != "metrics-export-port":
            fixed.append(int(port))
    assert len(fixed) == len(set(fixed))
    for port in fixed:
        assert any(first <= port <= last for first, last in ranges), port
    environment = pod_specs(documents)["prefill"]["containers"][0]["env"]
    (ucx,) = [e["value"] for e in environment if e["name"] == "UCX_TCP_PORT_RANGE"]
    assert tuple(map(int, ucx.split("-"))) in ranges
