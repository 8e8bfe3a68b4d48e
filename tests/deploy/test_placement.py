"""Where pods run and what they bring: NVLink cliques, the model's volume, disruption budgets."""

from __future__ import annotations

import pytest

from tests.deploy.rendering import POOLS, VALUES, Document, Helm, group_of, pod_specs, the


def test_nvlink_domain_reaches_the_pools_only(rendered: dict[str, list[Document]]) -> None:
    documents = rendered["gb200"]
    domain = the(documents, "ComputeDomain")
    assert domain["apiVersion"] == "resource.nvidia.com/v1beta1"
    template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    pods = pod_specs(documents)
    for name in POOLS:
        assert pods[name]["resourceClaims"] == [
            {"name": "nvlink-channel", "resourceClaimTemplateName": template}
        ]
        resources = pods[name]["containers"][0]["resources"]
        assert resources["claims"] == [{"name": "nvlink-channel"}]
        assert resources["limits"]["rdma/ib"] == 4
    for name in pods.keys() - set(POOLS):
        assert "resourceClaims" not in pods[name], name


def test_two_releases_in_one_nvlink_clique_show_as_unschedulable(helm: Helm) -> None:
    """F5: a second claimant's pods stay Pending with the scheduler's reason."""
    gb200 = VALUES["gb200"]
    first = the(helm.template(*gb200), "RayCluster")
    second = the(helm.template(*gb200, "-n", "elsewhere"), "RayCluster")
    key = "hocket.clique-claimant"
    claimants = set[str]()
    for cluster in (first, second):
        for role in POOLS:
            template = group_of(cluster, role)["template"]
            claimant = template["metadata"]["labels"][key]
            claimants.add(claimant)
            affinity = template["spec"]["affinity"]
            required = "requiredDuringSchedulingIgnoredDuringExecution"
            (near,) = affinity["podAffinity"][required]
            assert near["labelSelector"]["matchLabels"] == {key: claimant}
            (far,) = affinity["podAntiAffinity"][required]
            assert {"key": key, "operator": "Exists"} in far["labelSelector"]["matchExpressions"]
            assert {"key": key, "operator": "NotIn", "values": [claimant]} in far["labelSelector"][
                "matchExpressions"
            ]
            assert far["namespaceSelector"] == {}
            assert near["topologyKey"] == far["topologyKey"] == "nvidia.com/gpu.clique"
    assert len(claimants) == 2


def test_a_pools_own_affinity_is_kept_beside_the_cliques(helm: Helm) -> None:
    own = '{"nodeAffinity":{"a":1},"podAntiAffinity":{"preferredX":[1]}}'
    cluster = the(
        helm.template(*VALUES["gb200"], "--set-json", f"decode.affinity={own}"), "RayCluster"
    )
    affinity = group_of(cluster, "decode")["template"]["spec"]["affinity"]
    assert affinity["nodeAffinity"] == {"a": 1}
    assert affinity["podAntiAffinity"]["preferredX"] == [1]
    assert len(affinity["podAntiAffinity"]) == 2


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        (["type=existingClaim", "claimName=models"], {"claimName": "models", "readOnly": True}),
        (["type=claim"], {"claimName": "hocket-model", "readOnly": True}),
        (["type=hostPath", "hostPath=/data"], {"path": "/data", "type": "Directory"}),
        (["type=emptyDir", "fetch.image=x", "fetch.command={get}"], {}),
    ],
)
def test_model_volume_is_read_only_where_the_model_is_read(
    helm: Helm, settings: list[str], source: Document
) -> None:
    chosen = [f"modelVolume.{setting}" for setting in settings]
    if "type=emptyDir" in settings:
        chosen.append("networkPolicy.enabled=false")
    documents = helm.template("--set", ",".join([*chosen, "config.model.path=/models/m"]))
    pods = pod_specs(documents)
    for name in ("gateway", *POOLS):
        (volume,) = [v for v in pods[name]["volumes"] if v["name"] == "model"]
        assert source in volume.values(), name
        (mount,) = [m for m in pods[name]["containers"][0]["volumeMounts"] if m["name"] == "model"]
        assert mount == {"name": "model", "mountPath": "/models", "readOnly": True}
        assert ("initContainers" in pods[name]) == (settings[0] == "type=emptyDir")
    assert "model" not in {v["name"] for v in pods["head"]["volumes"]}


def test_disruption_budgets_leave_what_was_asked(rendered: dict[str, list[Document]]) -> None:
    budgets = [d for d in rendered["gb200"] if d["kind"] == "PodDisruptionBudget"]
    least = {d["metadata"]["name"]: d["spec"]["minAvailable"] for d in budgets}
    assert least == {"hocket-prefill": 1, "hocket-decode": 16}
    assert not [d for d in rendered["default"] if d["kind"] == "PodDisruptionBudget"]
