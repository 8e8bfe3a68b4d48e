"""An API server that knows the RayCluster's schema, where that schema is at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cluster.kubernetes.api_server import ApiServer, Refused

CRD = Path(__file__).resolve().parents[4] / "shared" / "data" / "crds" / "ray.io_rayclusters.yaml"


@pytest.fixture(scope="session")
def schema_check() -> Callable[[dict[str, Any]], None] | None:
    """Refuses what KubeRay's CRD does; None where the CRD is not there."""
    if not CRD.is_file():
        return None
    spec = yaml.load(CRD.read_text(), Loader=yaml.CSafeLoader)["spec"]
    (version,) = [v for v in spec["versions"] if v["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    # Pod templates are Kubernetes' own matter and most of the schema.
    for group in (
        schema["properties"]["spec"]["properties"]["headGroupSpec"],
        schema["properties"]["spec"]["properties"]["workerGroupSpecs"]["items"],
    ):
        group["properties"]["template"] = {"x-kubernetes-preserve-unknown-fields": True}
    schema["properties"]["metadata"] = {"x-kubernetes-preserve-unknown-fields": True}
    validator = jsonschema.Draft202012Validator(_closed(schema))

    def check(cluster: dict[str, Any]) -> None:
        for error in validator.iter_errors(cluster):
            if error.validator == "additionalProperties":
                raise Refused(400, "BadRequest", f"strict decoding error: {error.message}")
            raise Refused(422, "Invalid", error.message)

    return check


def _closed(schema: Any) -> Any:
    """With unknown fields an error, as in the API server's strict mode."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


@pytest.fixture
def server(schema_check: Callable[[dict[str, Any]], None] | None) -> Iterator[ApiServer]:
    made = ApiServer(schema_check)
    yield made
    made.close()
