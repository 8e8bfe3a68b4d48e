"""How Hocket finds the RayCluster it runs in, and what that costs where there is none."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from control_plane.cluster.kubernetes_api import KubernetesApi
from control_plane.cluster.kubernetes_cluster import KubernetesCluster
from hocket import environment
from hocket.config import Config, load_config
from hocket.environment import RayClusterPod
from hocket.errors import ConfigError
from hocket.types import Role
from tests.cluster.kubernetes.api_server import ApiServer
from tests.cluster.kubernetes.kuberay import ray_cluster
from tests.cluster.kubernetes.rig import CLUSTER, Rig, api_of, empty_lease

POD = RayClusterPod(CLUSTER.name, CLUSTER.namespace, "hocket-gateway-worker-1")


def config_of(*overrides: str) -> Config:
    """Workers that fill a pod of four CPUs each."""
    common = ["prefill.placement.num_cpus=4", "decode.placement.num_cpus=4"]
    return load_config(None, [*common, "cluster.ray_address=head:6379", *overrides])


def in_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    monkeypatch.setattr(environment, "_KUBERNETES_TOKEN", token)
    monkeypatch.setenv("RAY_CLUSTER_NAME", POD.cluster)
    monkeypatch.setenv("RAY_CLUSTER_NAMESPACE", POD.namespace)
    monkeypatch.setenv("RAY_CLOUD_INSTANCE_ID", POD.name)


def test_kuberay_tells_a_pod_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_pod(monkeypatch, tmp_path)
    assert environment.ray_cluster_pod() == POD


@pytest.mark.parametrize("missing", ["token", "RAY_CLUSTER_NAME", "RAY_CLUSTER_NAMESPACE", "key"])
def test_elsewhere_sizes_are_rays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    in_pod(monkeypatch, tmp_path)
    config = config_of()
    if missing == "token":
        (tmp_path / "token").unlink()
    elif missing == "key":
        config = config_of("cluster.kubernetes=off")
    else:
        monkeypatch.delenv(missing)
    assert KubernetesCluster.found(config) is None


def test_the_official_client_is_not_loaded_elsewhere() -> None:
    code = (
        "import sys, control_plane.cluster.kubernetes_cluster as k\n"
        "from hocket.config import load_config\n"
        "assert k.KubernetesCluster.found(load_config()) is None\n"
        "sys.exit('kubernetes' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(("configured", "live", "starts"), [(2, 5, 2), (4, 2, 2), (3, 3, 3)])
def test_a_start_waits_for_no_pod_that_is_not_there(
    server: ApiServer, configured: int, live: int, starts: int
) -> None:
    server.put("rayclusters", ray_cluster(decode=live))
    config = config_of(f"decode.workers={configured}")
    sized = KubernetesCluster(api_of(server), POD, config).at_start(config)
    assert (sized.prefill.workers, sized.decode.workers) == (1, starts)


def test_a_group_that_does_not_fit_its_pods_ends_the_start(server: ApiServer) -> None:
    server.put("rayclusters", ray_cluster())
    config = config_of("decode.group_size=2")
    with pytest.raises(ConfigError, match=r"no room for a worker of 2 x {'CPU': 4.0}"):
        KubernetesCluster(api_of(server), POD, config).at_start(config)
    config = config_of("decode.placement.num_gpus=1")
    with pytest.raises(ConfigError, match=r"'GPU': 0.0}"):
        KubernetesCluster(api_of(server), POD, config).at_start(config)


def test_an_outage_while_workers_load_does_not_end_the_start(server: ApiServer) -> None:
    rig = Rig(server)
    cluster = KubernetesCluster(api_of(server), POD, config_of())
    server.fails_with = 503
    executor = cluster.executor(rig.launcher.pools)
    assert executor.workers(Role.DECODE).size == 1
    assert any("503" in note for note in executor.notes())
    server.fails_with = 0
    executor.tick()
    executor.resize(Role.DECODE, 2)
    assert rig.replicas("decode") == 2
    cluster.close()


def test_the_first_look_takes_the_lease_and_the_end_gives_it_back(server: ApiServer) -> None:
    rig = Rig(server)
    server.put("leases", empty_lease())
    cluster = KubernetesCluster(api_of(server), POD, config_of())
    executor = cluster.executor(rig.launcher.pools)
    holder = server.get("leases", "hocket-autoscaler")["spec"]["holderIdentity"]
    assert holder.startswith(f"{POD.name}-")
    executor.resize(Role.DECODE, 2)
    assert rig.replicas("decode") == 2
    cluster.close()
    assert server.get("leases", "hocket-autoscaler")["spec"]["holderIdentity"] == ""
    cluster.close()


def test_the_service_accounts_token_and_certificate_are_used(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    key, certificate, token = (tmp_path / name for name in ("key", "ca.crt", "token"))
    command = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -keyout {key}"
    command += f" -out {certificate} -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([openssl, *command.split()], check=True, capture_output=True, timeout=60)
    token.write_text("t0ken")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.put("rayclusters", ray_cluster())
    port = server.use_tls(context)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
    from kubernetes.config import incluster_config

    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
    server.token = "t0ken"
    assert KubernetesApi.in_cluster().read_ray_cluster(CLUSTER)["kind"] == "RayCluster"
    server.token = "another"
    with pytest.raises(ConfigError, match="401"):
        KubernetesApi.in_cluster().read_ray_cluster(CLUSTER)


def test_a_pod_without_an_api_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="cannot call the API server"):
        KubernetesApi.in_cluster()
