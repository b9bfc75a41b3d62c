"""How much each client may still ask for: a bucket for its requests and one for its tokens, of this process alone. Knows no keys."""

from __future__ import annotations

import math
from collections.abc import Callable

from specserve.api.keys import Client
from specserve.errors import RateLimited

REQUESTS, TOKENS = "requests", "tokens"


class Bucket:
    """Fills evenly up to a minute's worth. It can be overdrawn, since what an answer takes shows in the end; then it must fill up again first."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what, self._clock = what, clock
        self._per_minute: float | None = None
        self._level, self._when = 0.0, clock()

    def set_rate(self, per_minute: float | None) -> None:
        """A client that begins, or gets a limit, begins with a full bucket; one whose rate changes keeps what it has left."""
        if per_minute is not None:
            self._level = (
                per_minute if self._per_minute is None else min(self._filled(), per_minute)
            )
            self._when = self._clock()
        self._per_minute = per_minute

    def take(self, amount: float, name: str) -> float:
        """What was taken: the amount, but at most a minute's worth, so that a full bucket always does. Or raises RateLimited, and takes nothing."""
        if self._per_minute is None:
            return 0.0
        taken = min(amount, self._per_minute)
        self._level, self._when = self._filled(), self._clock()
        missing = taken - self._level
        if missing > 1e-6:
            wait_s = missing / self._per_minute * 60
            message = f"{name} has used up its {self._per_minute:g} {self._what} a minute; try again in {math.ceil(wait_s)} s"
            raise RateLimited(message, limit=self._what, retry_after_s=wait_s)
        self._level -= taken
        return taken

    def settle(self, *, taken: float, used: float) -> None:
        """What was taken too much comes back, and what was taken too little is taken now."""
        self._level += taken - used

    def _filled(self) -> float:
        assert self._per_minute is not None
        return min(
            self._per_minute, self._level + (self._clock() - self._when) * self._per_minute / 60
        )


class Account:
    """One client's two buckets."""

    def __init__(
        self, name: str, clock: Callable[[], float], limited: Callable[[str], None]
    ) -> None:
        self.name = name
        self._requests, self._tokens = Bucket(REQUESTS, clock), Bucket(TOKENS, clock)
        self._rates: tuple[float | None, float | None] = (None, None)
        self._limited = limited

    def set_rates(self, rates: tuple[float | None, float | None]) -> None:
        if rates != self._rates:
            self._rates = rates
            self._requests.set_rate(rates[0])
            self._tokens.set_rate(rates[1])

    def take_request(self) -> None:
        """Raises RateLimited."""
        self._take(self._requests, 1)

    def reserve(self, num_tokens: int) -> float:
        """For an answer that may take so many; to be settled. Raises RateLimited."""
        return self._take(self._tokens, num_tokens)

    def settle(self, reserved: float, *, used: int) -> None:
        self._tokens.settle(taken=reserved, used=used)

    def _take(self, bucket: Bucket, amount: float) -> float:
        try:
            return bucket.take(amount, self.name)
        except RateLimited as refusal:
            self._limited(refusal.limit)
            raise


class Accounts:
    """By name, so that a client that gets a new key does not begin anew."""

    def __init__(self, clock: Callable[[], float], limited: Callable[[str], None]) -> None:
        self._clock, self._limited = clock, limited
        self._accounts: dict[str, Account] = {}

    def of(self, client: Client) -> Account:
        account = self._accounts.get(client.name)
        if account is None:
            account = self._accounts[client.name] = Account(client.name, self._clock, self._limited)
        account.set_rates(client.rates)
        return account
