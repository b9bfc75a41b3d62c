"""Limit each client's requests and tokens a minute, and its requests under way. Knows no keys.

Each gateway has buckets of its own, from which it also takes what the others report that they used.
So all of them fall and fill alike, some two reports apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from specserve.api.keys import ApiClient
from specserve.errors import RateLimited
from specserve.types import Grammar

REQUESTS, TOKENS, CONCURRENT, GRAMMARS = "requests", "tokens", "concurrent", "grammars"
MAX_GRAMMARS = 16
"""Different grammars under way of one client: each takes an engine's time of its own."""
MAX_GATEWAYS = 1000
"""Gateways whose last report is remembered, those that are gone among them."""


@dataclass(frozen=True, slots=True)
class ClientUse:
    """The use of one gateway by one client, since that gateway has started."""

    name: str
    requests: float
    tokens: float  # with those reserved; it falls when a reservation is settled
    num_running: int


UseByGateway = Mapping[str, Sequence[ClientUse]]


class RateBucket:
    """A bucket that fills evenly up to a minute's worth.

    It can be overdrawn, since what an answer uses is known at its end only. It must fill up again
    before more can be taken.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what, self._clock = what, clock
        self._per_minute: float | None = None
        self._level, self._updated_at = 0.0, clock()
        self.used = 0.0  # in all, of this bucket's own takings

    def set_rate(self, per_minute: float | None) -> None:
        """Change the rate; None is no limit.

        A client that is new, or gets its first limit, has a full bucket. One whose rate changes
        keeps its level.
        """
        if per_minute is not None:
            self._level = (
                per_minute if self._per_minute is None else min(self._current_level(), per_minute)
            )
            self._updated_at = self._clock()
        self._per_minute = per_minute

    def take(self, amount: float, name: str) -> float:
        """Take `amount`, but at most a minute's worth, and return what was taken.

        A full bucket is thus always enough. Raises RateLimited, and takes nothing, if there is
        too little.
        """
        if self._per_minute is None:
            return 0.0
        taken = min(amount, self._per_minute)
        self._level, self._updated_at = self._current_level(), self._clock()
        missing = taken - self._level
        if missing > 1e-6:
            wait_s = missing / self._per_minute * 60
            message = (
                f"{name} has used up its {self._per_minute:g} {self._what} a minute; "
                f"try again in {math.ceil(wait_s)} s"
            )
            raise RateLimited(message, limit=self._what, retry_after_s=wait_s)
        self._level -= taken
        self.used += taken
        return taken

    def settle(self, *, taken: float, used: float) -> None:
        """Replace what was taken by what was used."""
        self._level += taken - used
        if self._per_minute is not None:
            self.used += used - taken

    def charge(self, amount: float) -> None:
        """Take what was used elsewhere, or give back what was settled there, if it is negative."""
        if self._per_minute is not None:
            self._level, self._updated_at = self._current_level() - amount, self._clock()

    def _current_level(self) -> float:
        assert self._per_minute is not None
        return min(
            self._per_minute,
            self._level + (self._clock() - self._updated_at) * self._per_minute / 60,
        )


class Account:
    """One client's buckets for requests and tokens, and its requests under way."""

    def __init__(
        self, name: str, clock: Callable[[], float], count_rate_limited: Callable[[str], None]
    ) -> None:
        self.name = name
        self._requests, self._tokens = RateBucket(REQUESTS, clock), RateBucket(TOKENS, clock)
        self._rates: tuple[float | None, float | None] = (None, None)
        self._count_rate_limited = count_rate_limited
        self._num_running, self.max_running = 0, math.inf
        self._grammars: Counter[Grammar] = Counter()  # of the requests under way
        self.num_running_elsewhere = 0  # at other gateways, as they reported last

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def use(self) -> ClientUse:
        return ClientUse(self.name, self._requests.used, self._tokens.used, self._num_running)

    @property
    def is_limited(self) -> bool:
        return self._rates != (None, None) or self.max_running < math.inf

    def charge(self, *, requests: float, tokens: float) -> None:
        """Take from the buckets what was used at another gateway."""
        self._requests.charge(requests)
        self._tokens.charge(tokens)

    def set_rates(self, rates: tuple[float | None, float | None]) -> None:
        if rates != self._rates:
            self._rates = rates
            self._requests.set_rate(rates[0])
            self._tokens.set_rate(rates[1])

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is under way. Raises RateLimited before that."""
        num_running = self._num_running + self.num_running_elsewhere
        if num_running >= self.max_running:
            self._count_rate_limited(CONCURRENT)
            raise RateLimited(
                f"{self.name} has {num_running} requests under way, and its limit is "
                f"{self.max_running:g}",
                limit=CONCURRENT,
            )
        self._take(self._requests, 1)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def reserve(self, num_tokens: int, grammar: Grammar | None = None) -> float:
        """Reserve the most tokens that an answer may use, to be settled. Raises RateLimited."""
        is_new = grammar is not None and grammar not in self._grammars
        if is_new and len(self._grammars) >= MAX_GRAMMARS:
            self._count_rate_limited(GRAMMARS)
            raise RateLimited(
                f"{self.name} has texts under {MAX_GRAMMARS} different grammars under way, "
                "which is the most",
                limit=GRAMMARS,
            )
        reserved = self._take(self._tokens, num_tokens)
        if grammar is not None:
            self._grammars[grammar] += 1
        return reserved

    def settle(self, reserved: float, *, used: int, grammar: Grammar | None = None) -> None:
        """End a reservation, with the tokens that were used of it."""
        self._tokens.settle(taken=reserved, used=used)
        if grammar is not None:
            self._grammars[grammar] -= 1
            self._grammars += Counter()  # drops grammars of no request

    def _take(self, bucket: RateBucket, amount: float) -> float:
        try:
            return bucket.take(amount, self.name)
        except RateLimited as refusal:
            self._count_rate_limited(refusal.limit)
            raise


class Reservation:
    """Tokens reserved of all accounts that an answer is charged to, until it is settled."""

    def __init__(
        self, accounts: Sequence[Account], num_tokens: int, grammar: Grammar | None = None
    ) -> None:
        """Reserve of each account, the first of which counts the grammar. Raises RateLimited."""
        self._grammar = grammar
        self._reserved: list[tuple[Account, float]] = []
        try:
            for account in accounts:
                counted = None if self._reserved else grammar
                self._reserved.append((account, account.reserve(num_tokens, counted)))
        except RateLimited:
            self.settle(0)
            raise

    def settle(self, used: int) -> None:
        """End the reservation, with the tokens that were used of it."""
        for number, (account, reserved) in enumerate(self._reserved):
            account.settle(reserved, used=used, grammar=None if number else self._grammar)


class Accounts:
    """Accounts by client name. A new key for a client does not reset its account."""

    def __init__(
        self, clock: Callable[[], float], count_rate_limited: Callable[[str], None]
    ) -> None:
        self._clock, self._count_rate_limited = clock, count_rate_limited
        self._accounts: dict[str, Account] = {}
        # What each other gateway has reported last, by client.
        self._seen: dict[str, dict[str, ClientUse]] = {}

    def get(self, client: ApiClient) -> Account:
        account = self._accounts.get(client.name)
        if account is None:
            account = self._accounts[client.name] = Account(
                client.name, self._clock, self._count_rate_limited
            )
        account.set_rates(client.rates)
        account.max_running = client.concurrent_requests or math.inf
        return account

    def most_running(self) -> int:
        """Return the requests under way of the client that has the most here."""
        return max((account.num_running for account in self._accounts.values()), default=0)

    def uses(self) -> tuple[ClientUse, ...]:
        """Return what clients with limits have used here since the start."""
        return tuple(account.use for account in self._accounts.values() if account.is_limited)

    def charge_others(self, others: UseByGateway) -> None:
        """Take what other gateways report, as far as it is new; none: they are not known now.

        A gateway that is seen for the first time is charged from then on: it may be this one that
        is new. A report that is missing for a while loses nothing, since reports are totals.
        """
        running: dict[str, int] = {}
        for gateway, uses in others.items():
            seen = self._seen.pop(gateway, None)  # put back last: the newest are kept
            for use in uses:
                running[use.name] = running.get(use.name, 0) + use.num_running
                if seen is not None:
                    self._charge(use, seen.get(use.name))
            self._seen[gateway] = (seen or {}) | {use.name: use for use in uses}
        while len(self._seen) > MAX_GATEWAYS:
            del self._seen[next(iter(self._seen))]
        for name, account in self._accounts.items():
            account.num_running_elsewhere = running.get(name, 0)

    def _charge(self, use: ClientUse, before: ClientUse | None) -> None:
        account = self._accounts.get(use.name)
        if account is not None:
            account.charge(
                requests=use.requests - (before.requests if before else 0),
                tokens=use.tokens - (before.tokens if before else 0),
            )
