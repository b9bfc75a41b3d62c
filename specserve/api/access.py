"""Decide who may send requests: keys, the accounts of their clients, and requests under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from specserve.api.key_file import CHECK_EVERY_S, KeyFile, KeyTrouble
from specserve.api.keys import OF_MODEL, ApiClient
from specserve.api.metering import KeyMetrics
from specserve.api.rates import Account, Accounts, ClientUse, UseByGateway
from specserve.config.sections import HttpConfig
from specserve.errors import KeyRevoked
from specserve.metrics import Registry

log = logging.getLogger(__name__)


class KeyUse:
    """A request under way: the key that it came with, the client's accounts, and its end."""

    def __init__(self, client: ApiClient, account: Account, under_way: ExitStack) -> None:
        """Count the request on the account until `under_way` is closed. Raises RateLimited."""
        self.client, self.account = client, account
        self.accounts: list[Account] = []  # that it is charged to
        self._under_way = under_way
        self.charge_to(account)
        self._revoked: KeyRevoked | None = None
        self._end: Callable[[KeyRevoked], None] | None = None

    def charge_to(self, account: Account) -> None:
        """Count the request, and later its tokens, on a further account. Raises RateLimited."""
        self._under_way.enter_context(account.request())
        self.accounts.append(account)

    def on_revoked(self, end: Callable[[KeyRevoked], None]) -> None:
        """Call `end` when the key is no longer valid, or now if it is not."""
        self._end = end
        if self._revoked is not None:
            end(self._revoked)

    def revoke(self) -> None:
        if self._revoked is None:
            self._revoked = KeyRevoked("the API key is no longer valid")
            if self._end is not None:
                self._end(self._revoked)


def may_ask_full_engines(access: ClientAccess | None, use: KeyUse | None) -> bool:
    """Return whether a request may be sent to engines that refuse others just now."""
    return access is not None and use is not None and access.has_small_share(use)


class ClientAccess:
    """The clients of a server that asks for keys, and their requests under way.

    While there are any, their keys are looked up once a second, and requests whose key is no longer
    valid are ended.
    """

    def __init__(self, keys: KeyFile, accounts: Accounts) -> None:
        self._keys, self._accounts = keys, accounts
        self._uses: set[KeyUse] = set()
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def from_config(
        cls, http: HttpConfig, registry: Registry, models: Collection[str] = ()
    ) -> ClientAccess | None:
        """Read the file of keys; without one, return None: every request is served.

        Limits for none of the `models`, if they are given, are logged.
        """
        if http.api_keys_file is None:
            return None
        metrics = KeyMetrics(registry)
        keys = KeyFile(Path(http.api_keys_file), set_valid=metrics.set_keys_valid)
        if models and (unknown := sorted(keys.limited_models() - set(models))):
            log.warning(
                "http.api_keys_file has limits for models that are not served: %s",
                ", ".join(unknown),
            )
        return cls(keys, Accounts(time.monotonic, metrics.count_rate_limited))

    def find(self, key: str) -> ApiClient | None:
        """Return the client of a valid key. Raises Unavailable if keys cannot be checked."""
        return self._keys.find(key)

    @contextmanager
    def request(self, client: ApiClient) -> Iterator[KeyUse]:
        """Count a request of the client while it is under way. Raises RateLimited before that."""
        with ExitStack() as under_way:
            use = KeyUse(client, self._accounts.get(client), under_way)
            self._uses.add(use)
            if self._watch is None:
                self._watch = asyncio.create_task(self._watch_keys())
            try:
                yield use
            finally:
                self._uses.remove(use)

    def charge_model(self, use: KeyUse, model: str) -> None:
        """Count a request on the client's limits for the model too. Raises RateLimited."""
        client = use.client.for_model(model)
        if client is not None:
            use.charge_to(self._accounts.get(client))

    def has_small_share(self, use: KeyUse) -> bool:
        """Return whether another client has more requests under way than this request's client.

        A full engine then gives it a place of that client, unless that has none that waits.
        """
        return self._accounts.most_running() > use.account.num_running

    def uses(self) -> tuple[ClientUse, ...]:
        """Return what clients with limits have used of this gateway, for the others."""
        return self._accounts.uses()

    def charge_others(self, others: UseByGateway) -> None:
        """Take what clients have used of other gateways from what they may use here."""
        names = {use.name.partition(OF_MODEL) for uses in others.values() for use in uses}
        for client in self._keys.named({name for name, _, _ in names}):
            self._accounts.get(client)  # also of one that has not come here yet
            for name, _, model in names:
                if name == client.name and (limited := client.for_model(model)) is not None:
                    self._accounts.get(limited)
        self._accounts.charge_others(others)

    def trouble(self) -> KeyTrouble | None:
        """Return why keys cannot be read any more; metrics show it from then on."""
        return self._keys.trouble()

    async def _watch_keys(self) -> None:
        try:
            while self._uses:
                await asyncio.sleep(CHECK_EVERY_S)
                for use in [use for use in self._uses if not self._keys.is_valid(use.client)]:
                    use.revoke()
        finally:
            self._watch = None
