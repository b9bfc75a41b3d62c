"""The address of the Ray cluster to join: from the command line or RAY_ADDRESS, and answered.

Starts nothing. Ray itself would wait for 40 s before it says that nothing answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from specserve.errors import ConfigError, Unavailable, first_line

ENVIRONMENT_KEY = "RAY_ADDRESS"
LOCAL = "local"  # Ray's word for a Ray of one's own
ANY_RUNNING = "auto"  # and for the cluster that runs on this machine
ANSWER_TIMEOUT_S = 5.0
WAYS = (
    "--join HOST:PORT names a cluster (`ray start --head` prints it, port 6379 unless set), "
    "--own-ray starts one"
)
TOKEN_REMEDY = (
    "set RAY_AUTH_MODE=token here, with the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
)


def address_to_join(
    join: str | None, *, own_ray: bool, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the address that was requested, or None for a Ray of our own.

    The command line is stronger than RAY_ADDRESS.
    """
    asked = None if own_ray else join or environment.get(ENVIRONMENT_KEY)
    return None if asked in (None, "", LOCAL) else asked


def resolve(address: str) -> str:
    """Return host and port of the address; `auto` is the one cluster that runs here."""
    if "://" in address:
        raise ConfigError(
            f"cannot join {address}: specserve runs on a node of the cluster, not through Ray "
            f"Client; {WAYS}"
        )
    from ray._private.services import canonicalize_bootstrap_address

    if address == ANY_RUNNING and not os.environ.get(ENVIRONMENT_KEY):
        _require_one(running_clusters())
    try:
        resolved = canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError, OSError) as error:
        raise ConfigError(f"cannot join {address}: {first_line(error)}; {WAYS}") from error
    if resolved is None:  # RAY_ADDRESS=local
        raise ConfigError(f"--join {address} contradicts {ENVIRONMENT_KEY}=local; {WAYS}")
    return resolved


def running_clusters() -> tuple[str, ...]:
    """Return the addresses of the clusters whose head is this machine."""
    from ray._private.services import find_gcs_addresses

    return tuple(sorted(find_gcs_addresses()))


def require_answer(address: str) -> None:
    """Raise Unavailable if no Ray cluster answers there, or it does not accept our token.

    Where RAY_AUTH_MODE does not say otherwise, a cluster that wants a token gets the one that Ray
    finds here, as `ray start` does with it.
    """
    refusal = _refusal(address)
    if refusal is not None and _uses_token_that_lies_here():
        refusal = _refusal(address)
    if refusal is not None:
        raise Unavailable(
            f"the Ray cluster at {address} did not accept the token: {refusal}; {TOKEN_REMEDY}"
        )


def _refusal(address: str) -> str | None:
    """Return why a cluster does not accept our token, or None if it does, or asks for none."""
    import grpc  # type: ignore[import-untyped]
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
    from ray.exceptions import AuthenticationError

    messages: Any = gcs_service_pb2  # generated at run time, so without types
    try:
        channel = init_grpc_channel(address, [("grpc.enable_http_proxy", 0)])
        with channel:
            service = NodeInfoGcsServiceStub(channel)
            service.GetClusterId(messages.GetClusterIdRequest(), timeout=ANSWER_TIMEOUT_S)
    except AuthenticationError as error:
        raise Unavailable(f"cannot join {address}: {first_line(error)}; {TOKEN_REMEDY}") from error
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return str(error.details())
        raise Unavailable(
            f"no Ray cluster answers at {address}; see whether it runs there "
            f"(`ray status --address {address}`); {WAYS}"
        ) from error
    return None


def _uses_token_that_lies_here() -> bool:
    """Have Ray send the token that it finds, and return whether there is one to try."""
    from ray._private.authentication import authentication_token_setup

    if os.environ.get(authentication_token_setup.AUTH_MODE_ENV_VAR) is not None:
        return False
    authentication_token_setup.logger.setLevel(logging.ERROR)  # we report what matters
    use = authentication_token_setup.maybe_enable_token_auth_if_token_available
    return bool(use(warn_if_disabled=False))


def _require_one(found: tuple[str, ...]) -> None:
    if not found:
        raise ConfigError(f"cannot join: no Ray cluster runs on this machine; {WAYS}")
    if len(found) > 1:
        raise ConfigError(
            f"several Ray clusters run on this machine: {', '.join(found)}; "
            f"name one, such as --join {found[0]}"
        )
