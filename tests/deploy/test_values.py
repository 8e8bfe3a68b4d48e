"""What values.schema.json and the chart's checks refuse, and that they say which key is wrong."""

from __future__ import annotations

import json
import re
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from hocket.config import Config
from tests.deploy.rendering import CHART, Helm

# Keys of Hocket's configuration that follow from other values of the chart.
FROM_OTHER_VALUES = {
    "prefill.workers",
    "prefill.placement",
    "decode.workers",
    "decode.placement",
    "gateway.host",
    "gateway.port",
    "gateway.http_port",
    "autoscaler.enabled",
    "autoscaler.prefill",
    "autoscaler.decode",
    "telemetry.metrics_host",
    "telemetry.metrics_port",
    "redis.url",
    "cluster.ray_address",
    "cluster.host",
}
# For tests only: a chart must not offer it.
NOT_OFFERED = {"faults"}
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
TYPES |= {dict[str, float]: "object"}

# A wrong value, and what the error must name.
REFUSED_BY_SCHEMA = [
    ("prefil={}", "prefil"),
    ("prefill.replica=2", "replica"),
    ("prefill.replicas=0", "replicas"),
    ("decode.numOfHosts=2", "numOfHosts"),
    ("config.autoscaler.ttft_s=0", "ttft_s"),
    ("decode.gpus=-1", "gpus"),
    ("decode.gpus=half", "gpus"),
    ("prefill.memory=lots", "memory"),
    ("prefill.rdma.resource=ib", "resource"),
    ("decode.labels.hocket\\.pool=mine", "hocket.pool"),
    ("image.pullPolicy=Sometimes", "pullPolicy"),
    ("modelVolume.type=nfs", "type"),
    ("modelVolume.mountPath=models", "mountPath"),
    ("config.model.dtyp=auto", "dtyp"),
    ("config.model.dtype=int8", "dtype"),
    ("config.decode.draft_tokens=17", "draft_tokens"),
    ("config.gateway.port=1", "port"),
    ("config.parallel.tensor=2", "tensor"),
    ("config.transfer.require=tcp", "require"),
    ("config.faults.failed=0.5", "faults"),
    ("computeDomain.cliqueAffinity=yes", "cliqueAffinity"),
    ("gateway.port=80", "port"),
    ("gateway.httpPort=80", "httpPort"),
    ("gateway.service.type=ExternalName", "type"),
    ("ray.version=latest", "version"),
    ("ray.upgradeStrategy=Rolling", "upgradeStrategy"),
    ("store.url=http://x", "url"),
    ("gcsStore.address=redis", "address"),
    ("networkPolicy.ucxPorts.first=70000", "first"),
]
REFUSED_TOGETHER = [
    ("prefill.processesPerPod=2", "prefill.processesPerPod is 2, but prefill.cpus is only 1"),
    ("decode.gpus=3,decode.cpus=4,decode.processesPerPod=2", "decode.gpus is 3"),
    (
        "config.decode.group_size=6,decode.cpus=4,decode.processesPerPod=4",
        "config.decode.group_size is 6, decode.processesPerPod 4: one must divide the other",
    ),
    (
        "config.decode.group_size=2,decode.cpus=3,decode.processesPerPod=3",
        "config.decode.group_size is 2, decode.processesPerPod 3: one must divide the other",
    ),
    ("autoscaling.enabled=true,decode.replicas=9", "decode.replicas is 9; it must be from"),
    ("config.model.path=/models/x", 'config.model.path is "/models/x", but modelVolume.type'),
    (
        "config.model.path=/else/x,modelVolume.type=existingClaim,modelVolume.claimName=c",
        'it must lie below modelVolume.mountPath ("/models")',
    ),
    ("modelVolume.type=existingClaim", "set modelVolume.claimName"),
    ("modelVolume.type=hostPath", "set modelVolume.hostPath"),
    ("modelVolume.type=emptyDir", "set modelVolume.fetch.image"),
    ("store.url=redis://x:6379", "store.url leads out of this release"),
    ("gcsStore.address=x:6379", "gcsStore.address leads out of this release"),
    (
        "store.url=redis://x:6379,store.urlSecret.name=y,networkPolicy.enabled=false",
        "store.url and store.urlSecret.name are both set",
    ),
    ("computeDomain.enabled=true", "neither prefill.gpus nor decode.gpus"),
]


@pytest.mark.parametrize(("setting", "named"), REFUSED_BY_SCHEMA, ids=lambda text: str(text))
def test_schema_refuses(helm: Helm, setting: str, named: str) -> None:
    flag = "--set-json" if setting.endswith("{}") else "--set"
    done = helm("template", "hocket", str(CHART), flag, setting)
    assert done.returncode != 0
    assert "schema" in done.stderr
    assert re.search(rf"\b{re.escape(named)}\b", done.stderr), done.stderr


@pytest.mark.parametrize(("settings", "message"), REFUSED_TOGETHER, ids=lambda text: str(text))
def test_values_that_do_not_go_together_are_refused(
    helm: Helm, settings: str, message: str
) -> None:
    done = helm("template", "hocket", str(CHART), "--set", settings)
    assert done.returncode != 0
    assert message in done.stderr


def test_schema_says_of_the_configuration_what_hocket_says() -> None:
    """A key that was added to hocket/config.py must be added to values.schema.json."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    said: dict[str, Any] = {}
    for table, content in schema["properties"]["config"]["properties"].items():
        assert content["additionalProperties"] is False, table
        for key, limits in content["properties"].items():
            said[f"{table}.{key}"] = limits
    expected: dict[str, Any] = {}
    for table, settings in typing.get_type_hints(Config).items():
        if table in NOT_OFFERED:
            continue
        kinds = typing.get_type_hints(settings)
        for key in fields(settings):
            name = f"{table}.{key.name}"
            if name in FROM_OTHER_VALUES:
                continue
            metadata = key.metadata
            limits: dict[str, Any] = {"type": TYPES[kinds[key.name]]}
            if kinds[key.name] == dict[str, float]:
                limits["additionalProperties"] = {"type": "number"}
            if "choices" in metadata:
                limits = {"enum": list(metadata["choices"])}
            limits |= {"minimum": metadata["min"]} if "min" in metadata else {}
            limits |= {"maximum": metadata["max"]} if "max" in metadata else {}
            expected[name] = limits
    assert said == expected


def test_every_object_of_the_schema_is_closed_or_free_on_purpose() -> None:
    free: list[str] = []

    def walk(schema: Any, where: str) -> None:
        if isinstance(schema, dict):
            if schema.get("type") == "object" and "additionalProperties" not in schema:
                free.append(where)
            for key, inner in schema.items():
                walk(inner, f"{where}/{key}")
        elif isinstance(schema, list):
            for inner in schema:
                walk(inner, where)

    walk(json.loads((CHART / "values.schema.json").read_text()), "")
    # What Kubernetes itself checks, and what Helm adds.
    assert {where.rsplit("/", 1)[-1] for where in free} == {
        "global",
        "valueFrom",
        "affinity",
        "items",
    }
    assert len(free) == 4


def test_every_default_is_described_by_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def resolve(part: Any) -> Any:
        reference = part.get("$ref")
        return schema["definitions"][reference.rsplit("/", 1)[-1]] if reference else part

    def keys(part: Any, where: str) -> set[str]:
        part = resolve(part)
        found = {where} if where else set[str]()
        for key, inner in part.get("properties", {}).items():
            found |= keys(inner, f"{where}.{key}".strip("."))
        return found

    def given(part: Any, where: str) -> set[str]:
        found = {where} if where else set[str]()
        if isinstance(part, dict):
            for key, inner in part.items():
                found |= given(inner, f"{where}.{key}".strip("."))
        return found

    described, defaults = keys(schema, ""), given(values, "")
    assert defaults <= described
    # Only Hocket's own configuration, and what has no default, may be left out of values.yaml.
    left_out = {key for key in described - defaults if not key.startswith("config.")}
    assert left_out == {"global"}


def test_examples_are_named_in_the_documentation() -> None:
    page = Path(CHART.parents[2] / "docs" / "kubernetes.md").read_text()
    for example in (CHART / "examples").glob("*.yaml"):
        assert example.name in page
