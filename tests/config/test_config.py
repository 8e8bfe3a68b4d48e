"""The configuration says no, and says why."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from hocket.config import (
    Config,
    DecodeSettings,
    ModelSettings,
    PrefillSettings,
    load_config,
    worker_settings,
)
from hocket.errors import ConfigError
from hocket.types import Role

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"


def test_the_empty_file_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("")
    assert load_config(file) == load_config(None) == Config()


def test_values_of_the_file_reach_their_dataclass(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text(
        """
        [model]
        path = "/models/deepseek"
        batch_invariant = false
        [prefill]
        workers = 2
        kv_memory_gib = 4
        [prefill.placement]
        labels = {"hocket.pool" = "prefill"}
        resources = {nvlink = 1}
        """
    )
    config = load_config(file)
    assert config.model.name == "deepseek"
    assert not config.model.batch_invariant
    assert config.prefill.workers == 2
    assert config.prefill.kv_memory_gib == 4.0
    assert isinstance(config.prefill.kv_memory_gib, float)
    assert config.prefill.placement.labels == {"hocket.pool": "prefill"}
    assert config.prefill.placement.resources == {"nvlink": 1.0}
    assert config.decode == DecodeSettings()


def test_later_overrides_win_over_earlier_ones_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "port.toml"
    file.write_text("[gateway]\nport = 1\nhost = '127.0.0.2'")
    config = load_config(file, ["gateway.port=2", "gateway.port=3"])
    assert (config.gateway.host, config.gateway.port) == ("127.0.0.2", 3)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.path=/data/a model", "/data/a model"),
        ("model.path='quoted'", "quoted"),
        ("model.path=a=b", "a=b"),
        ("model.path=", ""),
    ],
)
def test_an_override_that_is_not_toml_is_a_string(override: str, value: str) -> None:
    assert load_config(None, [override]).model.path == value


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("prefill.chunk_token=3", ["prefill.chunk_token", "prefill.chunk_tokens?"]),
        ("prefil.workers=3", ["prefil ", "did you mean prefill?"]),
        ("decode.placement.num_cpu=3", ["decode.placement.num_cpus?"]),
        ("gateway.zzz=3", ["gateway.zzz", "known:", "port"]),
        ("model.dtype=fp8", ["model.dtype", "'fp8'", "'bfloat16'"]),
        ("gateway.port=99999", ["gateway.port", "99999", "65535"]),
        ("gateway.port=fast", ["gateway.port", "'fast'", "whole number"]),
        ("decode.draft_tokens=true", ["decode.draft_tokens", "True", "whole number"]),
        ("decode.draft_tokens=1.5", ["decode.draft_tokens", "1.5", "whole number"]),
        ("transfer.read_timeout_s=nan", ["transfer.read_timeout_s", "nan", "number"]),
        ("transfer.read_timeout_s=inf", ["transfer.read_timeout_s", "inf", "number"]),
        ("transfer.max_unread_share=1.5", ["max_unread_share", "1.5", "0.01 to 1"]),
        ("transfer.policy=ignore", ["transfer.policy", "'recompute'", "'fail'"]),
        ("model.batch_invariant=1", ["model.batch_invariant", "true or false"]),
        ("prefill.placement=3", ["prefill.placement", "a table"]),
        ("prefill.placement.resources.gpu=x", ["prefill.placement.resources.gpu", "'x'"]),
        ("gateway.port.x=3", ["gateway.port", "whole number"]),
        ("redis.lease_s=1.0", ["redis.lease_s", "renew_s"]),
        ("parallel.tensor=2", ["parallel.tensor", "2", "1"]),
        ("parallel.context=8", ["parallel.context", "8", "1"]),
        ("model.max_context_tokens=1", ["model.max_context_tokens", "1", "0, or at least 2"]),
        ("decode.interactivity={08=50.0}", ["decode.interactivity", "'08'", "8, not 08"]),
        ('decode.interactivity={"+8"=50.0}', ["decode.interactivity", "'+8'", "8, not 08"]),
        ('decode.interactivity={" 8"=50.0}', ["decode.interactivity", "' 8'", "8, not 08"]),
        ("decode.interactivity={1_0=50.0}", ["decode.interactivity", "'1_0'", "8, not 08"]),
        (f"decode.interactivity={{{'9' * 5000}=50.0}}", ["decode.interactivity", "8, not 08"]),
        ("decode.interactivity={0=50.0}", ["decode.interactivity", "'0'", "numbers of requests"]),
        ("decode.interactivity={8=0.0}", ["decode.interactivity.8", "0.0", "above 0"]),
        ("decode.interactivity={8=inf}", ["decode.interactivity.8", "inf"]),
        ("telemetry.metrics_port=-2", ["telemetry.metrics_port", "-2", "from -1 to 65535"]),
        ("gateway.port", ["gateway.port", "section.key=value"]),
        ("port=3", ["port=3", "section.key=value"]),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_way_out(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    for part in parts:
        assert part in str(caught.value)


def test_drafts_that_are_never_made_cannot_be_accepted() -> None:
    with pytest.raises(ConfigError, match=r"decode\.synthetic_acceptance.*decode\.draft_tokens"):
        load_config(None, ["decode.draft_tokens=0", "decode.synthetic_acceptance=0.8"])
    load_config(None, ["decode.draft_tokens=2", "decode.synthetic_acceptance=0.8"])


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read"):
        load_config(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\npath = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML"):
        load_config(broken)
    flat = tmp_path / "flat.toml"
    flat.write_text("gateway = 3")
    with pytest.raises(ConfigError, match="gateway is 3; it must be a table"):
        load_config(flat)


def test_a_missing_checkpoint_names_key_and_folder(tmp_path: Path) -> None:
    config = load_config(None, [f"model.path={tmp_path / 'nowhere'}"])
    with pytest.raises(ConfigError, match=r"model\.path .*nowhere"):
        config.model.checkpoint()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("some-people/a-model", "Hub names are not fetched: download it"),
        ("/nowhere/at/all", "there is no folder /nowhere/at/all"),
        ("a-model", "there is no folder a-model"),
        ("./nowhere", "there is no folder nowhere"),
        ("/", "/ has no config.json"),
        ("", "has no config.json"),
    ],
)
def test_why_a_path_is_no_checkpoint_is_said(path: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelSettings(path=path).checkpoint()
    assert why in str(caught.value)


def test_worker_settings_pickle_and_hold_their_own_pool() -> None:
    config = load_config(None, ["decode.draft_tokens=2", "cluster.host=127.0.0.3"])
    prefill = worker_settings(config, Role.PREFILL, 0, epoch=1)
    decode = worker_settings(config, Role.DECODE, 3, epoch=2)
    assert isinstance(prefill.pool, PrefillSettings)
    assert isinstance(decode.pool, DecodeSettings)
    assert (decode.worker_id, decode.epoch, decode.host) == ("decode-3", 2, "127.0.0.3")
    assert pickle.loads(pickle.dumps(decode)) == decode


def test_faults_are_off_unless_somebody_turns_them_on_and_reach_the_workers() -> None:
    assert Config().faults.total == 0
    config = load_config(None, ["faults.corrupted=0.25", "faults.failed=0.5", "faults.seed=7"])
    assert config.faults.total == 0.75
    assert worker_settings(config, Role.DECODE, 0, epoch=1).faults == config.faults


def test_shares_of_faults_above_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"faults is 1\.2; it must be shares .* at most 1"):
        load_config(None, ["faults.corrupted=0.5", "faults.failed=0.7"])


def test_b7_rdma_can_not_be_required_of_tcp() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.require is 'rdma'; .*transfer\.tls"):
        load_config(None, ["transfer.require=rdma", "transfer.tls=tcp"])


def test_every_key_is_documented_in_its_table() -> None:
    for table in fields(Config):
        settings = getattr(Config(), table.name)
        assert is_dataclass(settings)
        text = type(settings).__doc__ or ""
        if isinstance(settings, DecodeSettings):
            text += PrefillSettings.__doc__ or ""
        for key in fields(settings):
            assert f"{key.name}:" in text or f"{key.name}," in text, f"{table.name}.{key.name}"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.name)
def test_every_example_is_valid(file: Path) -> None:
    load_config(file)


def test_the_local_example_is_the_defaults() -> None:
    assert load_config(EXAMPLES / "local.toml") == Config()


def test_two_doors_at_one_port_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.admin_port is 7000; .* another port"):
        load_config(None, ["gateway.port=7000", "gateway.admin_port=7000"])
    load_config(None, ["gateway.port=0", "gateway.admin_port=0"])
