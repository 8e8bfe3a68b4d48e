"""Kubernetes' API, as far as Hocket uses it: one RayCluster, its pods, one Lease.

`KubernetesReplicas` and `KubernetesLease` say what they want in their own words; here it becomes
calls of the official client, each with a timeout and never repeated behind our back, and what goes
wrong becomes one of Hocket's errors. The client is imported when the first `KubernetesApi` is made:
who does not run on Kubernetes never pays for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hocket.errors import ApiUnavailable, ConfigError, ResizeRefused

_GROUP, _VERSION, _PLURAL = "ray.io", "v1", "rayclusters"
_TIMEOUT_S = 5.0
_CHANGED = (409, 422)
_BUSY = (408, 429)


@dataclass(frozen=True, slots=True)
class ObjectName:
    """An object of ours: "RayCluster serving/hocket" in messages."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


_RULES = {
    "RayCluster": (_GROUP, _PLURAL),
    "Pods": ("", "pods"),
    "Lease": ("coordination.k8s.io", "leases"),
}


class KubernetesApi:
    """Safe to use from several threads.

    Every method raises:
        ConfigError: the object is not there, or may not be touched; names object, verb and rule.
        ResizeRefused: it has changed in between (409), or a JSON patch does not apply (422).
        ApiUnavailable: no answer in time, or none that helps; the call may have been carried out.
    """

    def __init__(self, client: Any, *, timeout_s: float = _TIMEOUT_S) -> None:
        """`client`: a `kubernetes.client.ApiClient`; see `in_cluster`."""
        from kubernetes.client import CoordinationV1Api, CoreV1Api, CustomObjectsApi

        self._client = client
        self._custom = CustomObjectsApi(client)
        self._core = CoreV1Api(client)
        self._coordination = CoordinationV1Api(client)
        self._timeout_s = timeout_s

    @staticmethod
    def in_cluster() -> KubernetesApi:
        """With the token of this pod's service account.

        Raises:
            ConfigError: there is none.
        """
        from kubernetes.client import ApiClient, Configuration
        from kubernetes.config import ConfigException, load_incluster_config

        settings = Configuration()
        try:
            load_incluster_config(client_configuration=settings)
        except ConfigException as error:
            raise ConfigError(f"This pod cannot call the API server: {error}") from error
        # A repeated call that was carried out the first time would look like somebody else's.
        settings.retries = False
        return KubernetesApi(ApiClient(settings))

    def read_ray_cluster(self, cluster: ObjectName) -> dict[str, Any]:
        """The object as JSON."""
        with _asked("get", cluster):
            found = self._custom.get_namespaced_custom_object(
                *(_GROUP, _VERSION, cluster.namespace, _PLURAL, cluster.name),
                _request_timeout=self._timeout_s,
            )
        assert isinstance(found, dict), found
        return found

    def patch_ray_cluster(self, cluster: ObjectName, operations: list[dict[str, Any]]) -> None:
        """Applies a JSON patch: all of its operations or none."""
        with _asked("patch", cluster):
            self._custom.patch_namespaced_custom_object(
                *(_GROUP, _VERSION, cluster.namespace, _PLURAL, cluster.name, operations),
                field_manager="hocket",
                field_validation="Strict",
                _content_type="application/json-patch+json",
                _request_timeout=self._timeout_s,
            )

    def list_pods(self, cluster: ObjectName) -> list[Any]:
        """The `V1Pod`s of a RayCluster, those that end included."""
        with _asked("list", ObjectName("Pods", cluster.namespace, f"of {cluster.name}")):
            found = self._core.list_namespaced_pod(
                cluster.namespace,
                label_selector=f"ray.io/cluster={cluster.name}",
                _request_timeout=self._timeout_s,
            )
        return list(found.items)

    def read_lease(self, lease: ObjectName) -> Any:
        """A `V1Lease`."""
        with _asked("get", lease):
            return self._coordination.read_namespaced_lease(
                lease.name, lease.namespace, _request_timeout=self._timeout_s
            )

    def replace_lease(self, lease: ObjectName, body: Any) -> Any:
        """Writes a `V1Lease` over the one with its resourceVersion; returns it as it is now."""
        with _asked("update", lease):
            return self._coordination.replace_namespaced_lease(
                lease.name, lease.namespace, body, _request_timeout=self._timeout_s
            )

    def close(self) -> None:
        """Closes the client's connections."""
        self._client.close()


@contextmanager
def _asked(verb: str, target: ObjectName) -> Iterator[None]:
    """Turns what the client raises into Hocket's errors."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        status = error.status or 0
        said = f"{verb} {target}: {status} {error.reason}: {_message(error.body)}"
        if status in _CHANGED:
            raise ResizeRefused(said) from error
        if status in (401, 403):
            raise ConfigError(f"{said}. {_missing_rule(verb, target)}") from error
        if status >= 500 or status in _BUSY or status == 0:
            raise ApiUnavailable(said) from error
        raise ConfigError(said) from error
    except (HTTPError, OSError) as error:
        raise ApiUnavailable(
            f"{verb} {target}: no answer from the API server ({type(error).__name__})."
        ) from error


def _missing_rule(verb: str, target: ObjectName) -> str:
    group, resource = _RULES[target.kind]
    return (
        "The Role of this pod's service account lacks a rule: "
        f'apiGroups ["{group}"], resources [{resource}], verbs [{verb}]; '
        "the chart grants it with autoscaling.enabled=true."
    )


def _message(body: Any) -> str:
    """What the server says in words; an answer from something before it may be no JSON."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip().partition("\n")[0][:200] or "no reason given"
