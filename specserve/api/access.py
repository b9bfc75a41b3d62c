"""Decide who may send requests: keys, the accounts of their clients, and requests under way."""

from __future__ import annotations

import time
from pathlib import Path

from specserve.api.key_file import KeyFile, KeyTrouble
from specserve.api.metering import KeyMetrics
from specserve.api.rates import Account, Accounts
from specserve.config.tree import HttpConfig
from specserve.metrics import Registry


class ClientAccess:
    """The clients of a server that asks for keys."""

    def __init__(self, keys: KeyFile, accounts: Accounts) -> None:
        self._keys, self._accounts = keys, accounts

    @classmethod
    def from_config(cls, http: HttpConfig, registry: Registry) -> ClientAccess | None:
        """Read the file of keys; without one, return None: every request is served."""
        if http.api_keys_file is None:
            return None
        metrics = KeyMetrics(registry)
        return cls(
            KeyFile(Path(http.api_keys_file), set_valid=metrics.set_keys_valid),
            Accounts(time.monotonic, metrics.count_rate_limited),
        )

    def account(self, key: str) -> Account | None:
        """Return the account of a valid key. Raises Unavailable if keys cannot be checked."""
        client = self._keys.find(key)
        return None if client is None else self._accounts.get(client)

    def trouble(self) -> KeyTrouble | None:
        """Return why keys cannot be read any more; metrics show it from then on."""
        return self._keys.trouble()
