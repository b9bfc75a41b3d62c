"""A certificate and its key go to Serve, which then must not use HAProxy: it speaks no TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.cluster.launch import _http_options
from specserve.cluster.proxy_settings import HA_PROXY, serve_settings
from specserve.config.tree import Config, config_from_keys
from specserve.errors import ConfigError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using extra keyword arguments on `Field`:DeprecationWarning"
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("cert", "key"):
        (tmp_path / name).write_text("PEM")
    return config_from_keys(
        {},
        {
            "http.tls_cert": str(tmp_path / "cert"),
            "http.tls_key": str(tmp_path / "key"),
            "http.port": 8443,
        },
    )


def test_serve_accepts_our_http_options(config: Config) -> None:
    from ray.serve.config import HTTPOptions

    options = HTTPOptions(**_http_options(config))
    assert (options.ssl_certfile, options.ssl_keyfile) == (
        config.http.tls_cert,
        config.http.tls_key,
    )
    plain = HTTPOptions(**_http_options(config_from_keys({})))
    assert (plain.ssl_certfile, plain.ssl_keyfile) == (None, None)


def test_with_a_certificate_serves_own_proxy_replaces_haproxy(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HA_PROXY, raising=False)
    assert serve_settings(config)[HA_PROXY] == "0"
    assert serve_settings(config_from_keys({}))[HA_PROXY] == "1"


def test_haproxy_with_a_certificate_is_refused_rather_than_failing_every_request(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HA_PROXY, "1")
    with pytest.raises(ConfigError, match="HAProxy cannot speak TLS"):
        serve_settings(config)


def test_a_missing_certificate_is_reported_before_anything_starts(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HA_PROXY, raising=False)
    assert config.http.tls_key is not None
    Path(config.http.tls_key).unlink()
    with pytest.raises(
        ConfigError, match=r"key, of http.tls_cert and http.tls_key, cannot be read"
    ):
        serve_settings(config)


def test_haproxy_still_takes_no_certificate() -> None:
    """Fail once it takes one, when the special cases for TLS can be removed."""
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    assert " ssl" not in HAPROXY_CONFIG_TEMPLATE
