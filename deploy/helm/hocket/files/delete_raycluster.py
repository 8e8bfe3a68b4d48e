"""Deletes the RayCluster and waits until it is gone: runs before the rest is uninstalled.

KubeRay cleans the head's state out of its store before it lets the RayCluster go; uninstalled
together, the store would be gone first and the RayCluster would hang. Arguments: namespace, name.
"""

import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
namespace, name = sys.argv[1:]
url = f"https://kubernetes.default.svc/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{name}"
trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))


def call(method: str) -> int:
    """The status of the answer; 404 when there is no such RayCluster."""
    token = (ACCOUNT / "token").read_text()
    request = urllib.request.Request(
        url, method=method, headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10, context=trust) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return 404
        raise


if call("DELETE") != 404:
    print(f"waiting for RayCluster {namespace}/{name} to go", flush=True)
    while call("GET") != 404:
        time.sleep(2)
print(f"RayCluster {namespace}/{name} is gone")
