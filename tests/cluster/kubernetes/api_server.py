"""A small Kubernetes API server on loopback, as far as Hocket calls one, for real clients.

Versions grow with every write; a JSON patch applies whole or not at all; a failing `test` is 422, a
stale resourceVersion 409, an unknown field in strict mode 400, a wrong type 422, and what no rule
allows 403. Tests look at and change `objects` through its methods; `before_write` runs between a
client's read and its write.
"""

from __future__ import annotations

import copy
import json
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
# Resources by the group in their path; "" is Kubernetes' own first one.
RESOURCES = {"rayclusters": "ray.io", "leases": "coordination.k8s.io", "pods": ""}
KINDS = {"rayclusters": "RayCluster", "leases": "Lease", "pods": "Pod"}
EVERYTHING = [
    {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},
]


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class ApiServer:
    """One namespace's worth of objects."""

    def __init__(self, check: Callable[[Object], None] | None = None) -> None:
        """`check` raises `Refused` for a RayCluster that its schema does not allow."""
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str], Object] = {}
        self.rules: list[Object] = EVERYTHING
        self.before_write: list[Callable[[], None]] = []
        self.calls: list[str] = []
        self.answer_after_s = 0.0
        self.lose_answers = 0
        self.fails_with = 0
        self.token = ""
        self._check = check
        self._version = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def use_tls(self, context: ssl.SSLContext) -> int:
        """From now on connections are encrypted; returns the port."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        return self._server.server_address[1]

    def close(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, resource: str, body: Object) -> Object:
        """Creates or replaces it, as a user with all rights and no guard would."""
        with self.lock:
            key = (resource, body["metadata"]["name"])
            old = self.objects.get(key)
            if old is not None and _without_version(old) == _without_version(body):
                return old
            self._version += 1
            body = copy.deepcopy(body)
            body["metadata"]["resourceVersion"] = str(self._version)
            body["metadata"].setdefault("uid", f"uid-{self._version}")
            self.objects[key] = body
            return body

    def get(self, resource: str, name: str) -> Object:
        """A copy."""
        with self.lock:
            found = self.objects.get((resource, name))
            if found is None:
                raise Refused(404, "NotFound", f'{resource} "{name}" not found')
            return copy.deepcopy(found)

    def edit(self, resource: str, name: str, change: Callable[[Object], object]) -> None:
        """What `kubectl edit` does."""
        with self.lock:
            body = self.get(resource, name)
            change(body)
            self.put(resource, body)

    def delete(self, resource: str, name: str) -> None:
        with self.lock:
            self.objects.pop((resource, name), None)

    def listed(self, resource: str, labels: dict[str, str] | None = None) -> list[Object]:
        """Copies of all that have these labels."""
        wanted = (labels or {}).items()
        with self.lock:
            return [
                copy.deepcopy(body)
                for (kind, _), body in self.objects.items()
                if kind == resource and wanted <= (body["metadata"].get("labels") or {}).items()
            ]

    def answer(self, verb: str, path: str, content_type: str, body: Any) -> Object:
        """One request. Raises Refused."""
        url = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        parts = url.path.strip("/").split("/")
        at = parts.index("namespaces")
        group = parts[1] if parts[0] == "apis" else ""
        resource, name = parts[at + 2], parts[at + 3] if len(parts) > at + 3 else ""
        if RESOURCES.get(resource) != group:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        kube_verb = {"GET": "get" if name else "list", "PUT": "update", "POST": "create"}.get(
            verb, verb.lower()
        )
        self.calls.append(f"{kube_verb} {resource}")
        self._authorise(kube_verb, group, resource, name)
        if kube_verb == "list":
            selector = query.get("labelSelector", "")
            pairs = [pair.split("=", 1) for pair in selector.split(",") if pair]
            items = self.listed(resource, dict(pairs))
            return {"kind": f"{KINDS[resource]}List", "apiVersion": "v1", "items": items}
        if kube_verb == "get":
            return self.get(resource, name)
        for hook in list(self.before_write):
            hook()
        with self.lock:
            return self._write(kube_verb, resource, name, content_type, body, query)

    def _authorise(self, verb: str, group: str, resource: str, name: str) -> None:
        for rule in self.rules:
            names = rule.get("resourceNames")
            if (
                {group, "*"} & set(rule["apiGroups"])
                and {resource, "*"} & set(rule["resources"])
                and {verb, "*"} & set(rule["verbs"])
                and (names is None or name in names)
            ):
                return
        raise Refused(
            403, "Forbidden", f'cannot {verb} resource "{resource}" in API group "{group}"'
        )

    def _write(
        self, verb: str, resource: str, name: str, content_type: str, body: Any, query: Object
    ) -> Object:
        if verb == "create":
            name = body["metadata"]["name"]
            if (resource, name) in self.objects:
                raise Refused(409, "AlreadyExists", f'{resource} "{name}" already exists')
            return self.put(resource, body)
        old = self.get(resource, name)
        if verb == "update":
            new = body
        elif content_type == "application/json-patch+json":
            new = json_patch(old, body)
        elif content_type == "application/merge-patch+json":
            new = merge_patch(old, body)
        else:
            raise Refused(415, "UnsupportedMediaType", content_type)
        version = new["metadata"].get("resourceVersion")
        if version and version != old["metadata"]["resourceVersion"]:
            raise Refused(
                409, "Conflict", "the object has been modified; please apply your changes"
            )
        if resource == "rayclusters" and self._check is not None:
            if query.get("fieldValidation") != "Strict":
                raise Refused(400, "BadRequest", "tests want fieldValidation=Strict")
            self._check(new)
        return self.put(resource, new)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                content_type = self.headers.get("Content-Type", "")
                try:
                    said = self.headers.get("Authorization", "").lower()
                    if server.token and said != f"bearer {server.token}":
                        raise Refused(401, "Unauthorized", "Unauthorized")
                    if server.fails_with:
                        raise Refused(server.fails_with, "ServiceUnavailable", "not now")
                    status, answer = 200, server.answer(self.command, self.path, content_type, body)
                except Refused as refused:
                    status = refused.status
                    answer = {
                        "kind": "Status",
                        "apiVersion": "v1",
                        "status": "Failure",
                        "reason": refused.reason,
                        "message": str(refused),
                        "code": status,
                    }
                if server.answer_after_s:
                    server.stopping.wait(server.answer_after_s)
                if server.lose_answers and self.command != "GET":
                    server.lose_answers -= 1
                    self.close_connection = True
                    return
                sent = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            do_GET = do_PUT = do_POST = do_PATCH = _serve

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def json_patch(old: Object, operations: list[Object]) -> Object:
    """RFC 6902, as far as it is used. Raises Refused (422) for what does not apply."""
    new: Any = copy.deepcopy(old)
    for operation in operations:
        *way, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        try:
            parent = new
            for part in way:
                parent = parent[int(part)] if isinstance(parent, list) else parent[part]
            _apply(parent, int(last) if isinstance(parent, list) else last, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise Refused(422, "Invalid", f"{operation}: {error!r}") from error
    return new


def _apply(parent: Any, key: Any, operation: Object) -> None:
    kind = operation["op"]
    if kind == "test":
        if parent[key] != operation["value"]:
            raise ValueError("testing value failed")
    elif kind == "add":
        if isinstance(parent, list):
            parent.insert(key, operation["value"])
        else:
            parent[key] = operation["value"]
    elif kind == "replace":
        parent[key]
        parent[key] = operation["value"]
    elif kind == "remove":
        del parent[key]
    else:
        raise ValueError(kind)


def merge_patch(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merge_patch(new.get(key), value)
    return new


def _without_version(body: Object) -> Object:
    metadata = {k: v for k, v in body["metadata"].items() if k not in ("resourceVersion", "uid")}
    return {**body, "metadata": metadata}
