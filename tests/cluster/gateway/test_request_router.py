"""Serve's router of ours, over replicas that are stood in for: which engine gets a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from specserve.cluster.gateway.prefix_affinity import BLOCK, MAX_COMPARED
from specserve.cluster.gateway.request_router import (
    CACHED_TOKENS,
    PROTOCOL,
    RESTARTS,
    PrefixRequestRouter,
)
from specserve.types import Request, Warp
from specserve.wire.version import VERSION

ENGINES = DeploymentID("Engine", "app")
A, B, C = (ReplicaID(name, ENGINES) for name in "abc")
PROMPT = tuple(range(8 * BLOCK))
Scenario = Callable[[PrefixRequestRouter], Awaitable[None]]


@dataclass
class Replica:
    """The part of a running replica that a router reads."""

    replica_id: ReplicaID
    max_ongoing_requests: int = 8
    routing_stats: dict[str, int] = field(default_factory=dict)


def pending(*args: object, call: str = "call") -> Any:
    return SimpleNamespace(
        args=list(args),
        metadata=SimpleNamespace(internal_request_id=call),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def generation(prompt: tuple[int, ...], *, generated: tuple[int, ...] = ()) -> Any:
    return pending(Request(prompt, 8, Warp(), seed=1, generated=generated), 1, None)


def run(scenario: Scenario, replicas: list[Any]) -> None:
    async def main() -> None:
        await scenario(open_router(replicas))

    asyncio.run(main())


def open_router(replicas: list[Any]) -> PrefixRequestRouter:
    router = PrefixRequestRouter(  # type: ignore[no-untyped-call]
        ENGINES,
        DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    router.initialize_state(max_running=4)
    router._replicas = {replica.replica_id: replica for replica in replicas}
    router._replicas_list = list(replicas)
    return router


async def ranked(router: PrefixRequestRouter, call: Any) -> list[ReplicaID]:
    ranks = await router.choose_replicas(router._replicas_list, call)
    return [replica.replica_id for (replica,) in ranks]


def test_equal_prompts_that_come_together_go_to_one_engine() -> None:
    async def scenario(router: PrefixRequestRouter) -> None:
        first = (await ranked(router, generation(PROMPT)))[0]
        router.on_send_request(first)
        assert (await ranked(router, generation(PROMPT)))[0] == first

    run(scenario, [Replica(A), Replica(B), Replica(C)])


def test_every_engine_is_tried_and_full_ones_only_where_all_are() -> None:
    async def scenario(router: PrefixRequestRouter) -> None:
        call = generation(PROMPT)
        assert set(await ranked(router, call)) == {A, B}
        assert call.routing_context.should_backoff
        router.on_new_queue_len_info(A, 8)
        assert await ranked(router, call) == [B]
        router.on_new_queue_len_info(B, 8)
        assert set(await ranked(router, call)) == {A, B}

    run(scenario, [Replica(A), Replica(B)])


def test_a_resumed_request_goes_where_its_text_is() -> None:
    async def scenario(router: PrefixRequestRouter) -> None:
        written = tuple(range(5000, 5000 + 5 * BLOCK))
        router.on_request_routed(generation(PROMPT + written), B, None)
        router.on_request_completed(B, "call")
        assert (await ranked(router, generation(PROMPT, generated=written)))[0] == B

    run(scenario, [Replica(A), Replica(B), Replica(C)])


def test_requests_count_until_they_end() -> None:
    async def scenario(router: PrefixRequestRouter) -> None:
        other = pending(call="info")
        first = (await ranked(router, other))[0]
        router.on_request_routed(other, first, None)
        assert (await ranked(router, pending()))[0] != first
        router.on_request_completed(first, "info")
        assert (await ranked(router, pending()))[0] == first

    run(scenario, [Replica(A), Replica(B)])


def test_reports_of_engines_say_what_is_still_cached() -> None:
    async def scenario(router: PrefixRequestRouter) -> None:
        replica = router._replicas_list[0]
        state = router._state(replica)
        assert (state.cached_tokens, state.restarts, state.max_running) == (4096, 2, 4)

    run(scenario, [Replica(A, routing_stats={CACHED_TOKENS: 4096, RESTARTS: 2})])


def test_a_gateway_asks_engines_of_another_release_only_where_there_are_no_others() -> None:
    ours, theirs = {PROTOCOL: VERSION}, {PROTOCOL: VERSION + 1}

    async def chosen(*stats: dict[str, int]) -> set[ReplicaID]:
        named = zip((A, B, C), stats, strict=False)
        router = open_router([Replica(name, routing_stats=given) for name, given in named])
        return set(await ranked(router, generation(PROMPT)))

    async def cases() -> None:
        assert await chosen(theirs, ours, {}) == {B}, "the third has not reported yet"
        assert await chosen(theirs, {}) == {B}
        assert await chosen(theirs, theirs) == {A, B}, "they refuse it, and say why"

    asyncio.run(cases())


def test_all_calls_of_one_http_request_are_sent_and_counted() -> None:
    async def scenario(router: PrefixRequestRouter) -> None:
        for replica in (A, B):
            router.on_new_queue_len_info(replica, 0)
        calls = [
            PendingRequest(
                args=generation(prompt).args,
                kwargs={},
                metadata=RequestMetadata(request_id="r", internal_request_id="same"),
            )
            for prompt in (PROMPT, (1, 2, 3), (4, 5, 6))
        ]
        async with asyncio.timeout(10):
            chosen = await asyncio.gather(*map(router._choose_replica_for_request, calls))
        for call, engine in zip(calls, chosen, strict=True):
            router.on_request_routed(call, engine.replica_id, None)
        assert sum(router._under_way.values()) == 3
        router.on_request_completed(C, "same")
        assert sum(router._under_way.values()) == 3, "it was refused there"
        for engine in chosen:
            router.on_request_completed(engine.replica_id, "same")
        assert not sum(router._under_way.values())
        assert not router._calls

    run(scenario, [Replica(A), Replica(B)])


def test_a_call_gets_the_engine_that_was_chosen_for_it_though_it_has_to_be_asked_first() -> None:
    answers = asyncio.Event()

    @dataclass
    class SlowReplica(Replica):
        async def get_queue_len(self, *, deadline_s: float) -> int:
            await answers.wait()
            return 0

    async def scenario(router: PrefixRequestRouter) -> None:
        router.queue_len_response_deadline_s = 10.0
        router.on_new_queue_len_info(B, 0)
        other = tuple(range(9000, 9000 + 8 * BLOCK))
        slow, quick = (
            PendingRequest(
                args=generation(prompt).args,
                kwargs={},
                metadata=RequestMetadata(request_id="r", internal_request_id=name),
            )
            for prompt, name in ((PROMPT, "slow"), (other, "quick"))
        )
        for call, replica in ((slow, A), (quick, B)):
            router.on_request_routed(call, replica, None)
            router.on_request_completed(replica, call.metadata.internal_request_id)
        async with asyncio.timeout(10):
            first = asyncio.ensure_future(router._choose_replica_for_request(slow))
            second = asyncio.ensure_future(router._choose_replica_for_request(quick))
            assert (await second).replica_id == B
            answers.set()
            assert (await first).replica_id == A

    run(scenario, [SlowReplica(A), Replica(B)])


@dataclass
class IdleReplica(Replica):
    """A replica that says at once that it has nothing to do."""

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def many(number: int) -> list[Any]:
    return [IdleReplica(ReplicaID(f"{i:04}", ENGINES)) for i in range(number)]


def test_of_many_replicas_a_bounded_number_is_ranked_and_none_that_has_died() -> None:
    replicas = many(5 * MAX_COMPARED)

    async def scenario(router: PrefixRequestRouter) -> None:
        router.update_replicas(replicas)
        call = generation(PROMPT)
        first = await ranked(router, call)
        assert 1 < len(first) <= MAX_COMPARED
        assert (await ranked(router, call))[0] == first[0], "it has the prompt"
        router.on_replica_actor_died(first[0])
        assert first[0] not in await ranked(router, call)

    run(scenario, replicas)


def test_of_many_replicas_busy_ones_are_left_to_others() -> None:
    replicas = many(5 * MAX_COMPARED)

    async def scenario(router: PrefixRequestRouter) -> None:
        router.update_replicas(replicas)
        taken = set()
        for i in range(60):
            replica = (await ranked(router, generation((*PROMPT, i))))[0]
            router.on_request_routed(generation(PROMPT), replica, None)
            router.on_new_queue_len_info(replica, 8)
            taken.add(replica)
        assert len(taken) == 60, "each of them was full after one request"

    run(scenario, replicas)


def test_reports_of_the_same_replicas_drop_nothing_and_a_change_does() -> None:
    replicas = many(3)

    async def scenario(router: PrefixRequestRouter) -> None:
        router.update_replicas(replicas)
        first = (await ranked(router, generation(PROMPT)))[0]
        router.on_request_routed(generation(PROMPT), first, None)
        router.update_replicas(replicas)
        assert router._under_way[str(first)] == 1
        router.update_replicas([one for one in replicas if one.replica_id != first])
        assert not router._under_way
        assert not router._calls
        assert str(first) not in router._affinity._sent

    run(scenario, replicas)
