"""The chart under real Helm: it lints, and what it renders is valid, matches itself and Hocket."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hocket.rpc import generation_pb2
from tests.deploy.rendering import (
    CHART,
    POOLS,
    ROOT,
    VALUES,
    Document,
    Helm,
    config_of,
    group_of,
    pod_specs,
    the,
)

# Kinds that Kubernetes itself does not define.
CUSTOM_KINDS = {"RayCluster", "ComputeDomain"}
CRDS = ROOT.parent / "shared" / "data" / "crds"


@pytest.mark.parametrize("values", VALUES)
def test_chart_lints(helm: Helm, values: str) -> None:
    done = helm("lint", "--strict", str(CHART), *VALUES[values])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", VALUES)
def test_what_kubernetes_defines_is_valid(rendered: dict[str, list[Document]], values: str) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate holds Kubernetes' schemas"
    )
    unknown: set[str] = set()
    for document in rendered[values]:
        if document["kind"] in CUSTOM_KINDS:
            unknown.add(document["kind"])
            continue
        validator.validate(document, "1.30", strict=True)
    assert unknown == ({"RayCluster", "ComputeDomain"} if values == "gb200" else {"RayCluster"})


def _closed(schema: Any) -> Any:
    """A CRD's schema in which an unknown field is an error, as the API server's strict mode has."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


@pytest.fixture(scope="session")
def crd_schemas() -> dict[tuple[str, str], Any]:
    """Strict schemas of the custom kinds, by apiVersion and kind."""
    if not CRDS.is_dir():
        pytest.skip(f"no CRD schemas: {CRDS} is not there")
    schemas: dict[tuple[str, str], Any] = {}
    for path in sorted(CRDS.glob("*.yaml")):
        spec = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            schema = _closed(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            schemas[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return schemas


@pytest.mark.parametrize("values", VALUES)
def test_custom_kinds_fit_their_crds(
    rendered: dict[str, list[Document]], crd_schemas: dict[tuple[str, str], Any], values: str
) -> None:
    for document in rendered[values]:
        if document["kind"] in CUSTOM_KINDS:
            schema = crd_schemas[document["apiVersion"], document["kind"]]
            jsonschema.Draft202012Validator(schema).validate(document)


def test_a_typo_in_a_custom_kind_is_found(
    rendered: dict[str, list[Document]], crd_schemas: dict[tuple[str, str], Any]
) -> None:
    cluster = json.loads(json.dumps(the(rendered["default"], "RayCluster")))
    cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imagee"):
        jsonschema.Draft202012Validator(crd_schemas["ray.io/v1", "RayCluster"]).validate(cluster)


@pytest.mark.parametrize("values", VALUES)
def test_hocket_loads_the_configuration(
    rendered: dict[str, list[Document]], values: str, tmp_path: Path
) -> None:
    documents = rendered[values]
    config = config_of(documents, tmp_path)
    cluster = the(documents, "RayCluster")
    assert config.cluster.ray_address == "hocket-head-svc.serving.svc.cluster.local:6379"
    assert config.redis.url == "redis://hocket-store:6379/0"
    assert config.gateway.host == "0.0.0.0"
    ports = (config.gateway.port, config.gateway.http_port, config.telemetry.metrics_port)
    assert ports == (50051, 8000, 9090)
    for role in POOLS:
        group, pool = group_of(cluster, role), getattr(config, role)
        ranks = config.decode.group_size if role == "decode" else 1
        per_pod = pool.workers * ranks / (group["replicas"] * group["numOfHosts"])
        assert per_pod == int(per_pod) >= 1
        # Ray can place exactly these processes: labels, CPUs and GPUs of the group are theirs.
        assert pool.placement.labels.items() <= group["labels"].items()
        assert pool.placement.num_cpus * per_pod <= int(group["resources"]["cpu"])
        num_gpus = int(group["resources"].get("GPU", "0"))
        assert pool.placement.num_gpus * per_pod == num_gpus
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", 0) == num_gpus


def test_every_value_survives_the_way_into_the_configuration(helm: Helm, tmp_path: Path) -> None:
    chosen = {
        "model.served_name": r"it's <a> \"name\"",
        "model.batch_invariant": False,
        "transfer.max_unread_share": 0.25,
        "decode.kv_memory_gib": 1.5,
        "gateway.max_message_bytes": 16777216,
        "cluster.stuck_s": 30,
    }
    values: dict[str, Any] = {}
    for key, value in chosen.items():
        table, name = key.split(".")
        values.setdefault("config", {}).setdefault(table, {})[name] = value
    path = tmp_path / "values.yaml"
    path.write_text(json.dumps(values))
    config = config_of(helm.template("-f", str(path)), tmp_path)
    for key, value in chosen.items():
        table, name = key.split(".")
        assert getattr(getattr(config, table), name) == value, key


@pytest.mark.parametrize("values", VALUES)
def test_groups_are_what_hocket_needs(rendered: dict[str, list[Document]], values: str) -> None:
    cluster = the(rendered[values], "RayCluster")
    spec = cluster["spec"]
    assert [g["groupName"] for g in spec["workerGroupSpecs"]] == ["gateway", *POOLS]
    assert spec["enableInTreeAutoscaling"] is False
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["resources"] == {"cpu": "0"}
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        # KubeRay refuses them in both places.
        taken = {"num-cpus", "num-gpus", "memory", "resources", "labels"}
        assert not taken & group["rayStartParams"].keys()
        assert group["labels"]["hocket.pool"] == group.get("groupName", "head")
    for group in spec["workerGroupSpecs"]:
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_gateway_is_ready_when_its_own_health_says_so(
    rendered: dict[str, list[Document]],
) -> None:
    documents = rendered["default"]
    group = group_of(the(documents, "RayCluster"), "gateway")
    container = group["template"]["spec"]["containers"][0]
    service = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
    assert container["readinessProbe"]["grpc"] == {"port": 50051, "service": service}
    assert container["command"] == ["bash", "/etc/hocket/gateway.sh"]
    # Otherwise KubeRay puts `ray start --block` behind the command.
    annotations = group["template"]["metadata"]["annotations"]
    assert annotations["ray.io/overwrite-container-cmd"] == "true"
    served = the(documents, "Service", "hocket-gateway")["spec"]
    assert served["selector"] == {"ray.io/cluster": "hocket", "ray.io/group": "gateway"}
    named = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert named == {p["targetPort"]: p["port"] for p in served["ports"]}
    assert named == {"grpc": 50051, "http": 8000, "metrics": 9090}


def test_head_and_registry_have_stores_of_their_own(
    rendered: dict[str, list[Document]],
) -> None:
    documents = rendered["default"]
    head = the(documents, "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    assert head == {"redisAddress": "hocket-gcs-store:6379"}
    persistent = the(documents, "StatefulSet", "hocket-gcs-store")["spec"]
    assert persistent["volumeClaimTemplates"]
    assert "yes" in persistent["template"]["spec"]["containers"][0]["args"]
    soft = the(documents, "StatefulSet", "hocket-store")["spec"]
    assert "volumeClaimTemplates" not in soft
    names = {d["metadata"]["name"] for d in rendered["laptop"] if d["kind"] == "StatefulSet"}
    assert names == {"hocket-store"}


def test_external_stores_replace_the_charts_own(helm: Helm, tmp_path: Path) -> None:
    documents = helm.template(
        *("--set", "store.urlSecret.name=registry"),
        *("--set", "gcsStore.address=redis.example.com:6379"),
        *("--set", "gcsStore.passwordSecret.name=gcs"),
        *("--set-json", 'networkPolicy.extraEgress=[{"ports":[{"port":6379}]}]'),
    )
    assert not [d for d in documents if d["kind"] == "StatefulSet"]
    options = the(documents, "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis.example.com:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {
        "name": "gcs",
        "key": "password",
    }
    # The URL of the registry may hold a password: it is nowhere but in the gateway's environment.
    assert config_of(documents, tmp_path).redis.url == ""
    environment = pod_specs(documents)["gateway"]["containers"][0]["env"]
    assert {
        "name": "HOCKET_REDIS_URL",
        "valueFrom": {"secretKeyRef": {"name": "registry", "key": "url"}},
    } in environment


@pytest.mark.parametrize("release", ["a", "7b", "very-" * 10 + "x", "with.dots"])
def test_names_fit(helm: Helm, release: str) -> None:
    done = helm("template", release, str(CHART))
    assert done.returncode == 0, done.stderr
    cluster = re.search(r"kind: RayCluster\nmetadata:\n  name: (\S+)", done.stdout)
    assert cluster is not None
    name = cluster[1]
    # KubeRay's limit, and the letters it takes.
    assert len(name) <= 53
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    for made in re.findall(r"^  name: (\S+)$", done.stdout, re.MULTILINE):
        assert len(made) <= 63 - len("-0123456789"), made


def test_long_releases_that_begin_alike_have_different_names(helm: Helm) -> None:
    names = {
        the(helm.template("--set", f"fullnameOverride={'x' * 45}-{end}"), "RayCluster")["metadata"][
            "name"
        ]
        for end in "ab"
    }
    assert len(names) == 2


def test_notes_say_what_to_do_next(helm_of_version: Callable[[int], Helm]) -> None:
    # Helm 3 prints notes only when it reaches a cluster.
    done = helm_of_version(4)("install", "hocket", str(CHART), "-n", "serving", "--dry-run=client")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "kubectl wait -n serving --for=condition=Ready pod -l ray.io/cluster=hocket" in notes
    assert 'hocket generate "Return the" --address 127.0.0.1:50051' in notes
