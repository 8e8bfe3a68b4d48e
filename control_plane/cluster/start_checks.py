"""What `up` checks before it starts anything, and would otherwise fail on half a minute later."""

from __future__ import annotations

import socket

from control_plane.cluster.registry import check_redis
from control_plane.cluster.scaling_policy import check_local_workers
from control_plane.tokenizer import ModelTokenizer
from hocket import environment
from hocket.config import Config
from hocket.errors import ConfigError
from hocket.logs import check_folder
from hocket.model.model_config import ModelConfig
from hocket.parallel.expert_placement import ExpertPlacement


def check_before_start(config: Config, host: str) -> None:
    """`host`: what workers bind.

    Raises:
        ConfigError, CheckpointError: a setting that cannot work here; the message names it.
    """
    if environment.is_no_address(host):
        raise ConfigError(
            f"cluster.host is {host!r}: workers tell their peers the address that they bind, and "
            "nobody can call that one; leave it empty for each node's own.",
            field="cluster.host",
        )
    if not config.cluster.ray_address:
        check_local_workers(config)
        folder = config.model.checkpoint()
        model = ModelConfig.from_checkpoint(folder)
        if config.decode.group_size > 1:
            ExpertPlacement(model.num_experts, config.decode.group_size)
        ModelTokenizer(folder)
    if config.redis.url:
        check_redis(config.redis)
    if not config.redis.url and not environment.is_loopback(host):
        raise ConfigError(
            "redis.url is empty, but workers may run on other machines, which cannot reach "
            "an embedded store; set redis.url.",
            field="redis.url",
        )
    gateway, telemetry = config.gateway, config.telemetry
    if telemetry.log_folder:
        check_folder(telemetry.log_folder)
    metrics_host = telemetry.metrics_host or gateway.host
    _check_port(gateway.host, "gateway.port", gateway.port)
    _check_port(gateway.host, "gateway.http_port", gateway.http_port)
    _check_port(gateway.admin_host, "gateway.admin_port", gateway.admin_port)
    _check_port(metrics_host, "telemetry.metrics_port", telemetry.metrics_port)


def _check_port(host: str, field: str, port: int) -> None:
    """Raises ConfigError when nobody could listen there; -1 is nobody who wants to."""
    if port < 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{field} is {port}, to listen on {host!r}: {error.strerror or error}; is another "
                "gateway running? Port 0 takes a free one.",
                field=field,
            ) from error
