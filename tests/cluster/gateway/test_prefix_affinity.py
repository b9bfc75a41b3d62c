"""Choice of an engine by prefixes and load: shared prompts stay together unless that costs more."""

from __future__ import annotations

import random
from collections import Counter

from specserve.cluster.gateway.prefix_affinity import (
    BLOCK,
    MAX_COMPARED,
    NUM_HASHED,
    REQUEST_COST,
    EngineState,
    PrefixAffinity,
    block_hashes,
)

IDLE = EngineState(max_running=8)
NAMES = ("a", "b", "c", "d")


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1000), k=length))


def engines(**changed: EngineState) -> dict[str, EngineState]:
    return {name: changed.get(name, IDLE) for name in NAMES}


def test_a_prompt_goes_where_its_prefix_was_sent() -> None:
    affinity, prefix = PrefixAffinity(), text(0, 10 * BLOCK)
    for other in NAMES[1:]:
        affinity.record(other, text(hash(other), 10 * BLOCK), b"", IDLE)
    affinity.record("a", prefix, b"", IDLE)
    for seed in range(20):
        assert affinity.rank(prefix + text(seed, 30), b"", engines())[0] == "a"


def test_a_prefix_is_left_for_an_idle_engine_once_that_costs_less() -> None:
    affinity, prefix = PrefixAffinity(), text(0, 8 * BLOCK)
    affinity.record("a", prefix, b"", IDLE)
    saved = 7 * BLOCK  # the last block has the last token, which is computed
    for requests in range(8):
        busy = EngineState(requests=requests, max_running=8)
        stays = affinity.rank(prefix, b"", engines(a=busy))[0] == "a"
        assert stays == (requests * REQUEST_COST < 2 * saved)  # a copy displaces as much


def test_a_full_engine_is_left_however_long_the_prefix() -> None:
    affinity, prefix = PrefixAffinity(), text(0, 16 * BLOCK)
    affinity.record("a", prefix, b"", IDLE)
    full = EngineState(requests=3, max_running=3)
    assert affinity.rank(prefix, b"", engines(a=full))[0] != "a"


def test_clients_with_other_salts_share_no_prefix() -> None:
    affinity, prefix = PrefixAffinity(), text(0, 6 * BLOCK)
    affinity.record("a", prefix, b"one", IDLE)
    busy = EngineState(requests=1, max_running=8)
    assert affinity.rank(prefix + text(1, BLOCK), b"one", engines(a=busy))[0] == "a"
    assert affinity.rank(prefix + text(1, BLOCK), b"other", engines(a=busy))[0] != "a"


def test_new_prompts_spread_over_idle_engines_alike_in_every_gateway() -> None:
    prompts = [text(seed, 100) for seed in range(400)]
    taken = [PrefixAffinity().rank(prompt, b"", engines())[0] for prompt in prompts]
    assert taken == [PrefixAffinity().rank(prompt, b"", engines())[0] for prompt in prompts]
    assert min(Counter(taken).values()) > 60  # of 100 expected; 4.6 standard errors


def test_an_engine_is_taken_to_have_no_more_than_fits() -> None:
    affinity = PrefixAffinity()
    small = EngineState(max_running=8, cached_tokens=6 * BLOCK)
    old, new = text(0, 4 * BLOCK + 1), text(1, 4 * BLOCK + 1)
    affinity.record("a", old, b"", small)
    affinity.record("a", new, b"", small)
    busy = EngineState(requests=1, max_running=8, cached_tokens=6 * BLOCK)
    # 4 blocks of the new prompt weigh as much as a request; two are left of the old one.
    assert affinity._num_matched("a", small, block_hashes(new, b"")) == 4
    assert affinity._num_matched("a", small, block_hashes(old, b"")) == 2
    assert affinity.rank(old, b"", engines(a=busy))[0] != "a"


def test_a_restarted_target_has_an_empty_cache() -> None:
    affinity, prefix = PrefixAffinity(), text(0, 6 * BLOCK)
    affinity.record("a", prefix, b"", IDLE)
    restarted = EngineState(requests=1, max_running=8, restarts=1)
    assert affinity.rank(prefix, b"", engines(a=EngineState(requests=1, max_running=8)))[0] == "a"
    assert affinity.rank(prefix, b"", engines(a=restarted))[0] != "a"


def test_an_engine_that_is_gone_is_forgotten() -> None:
    affinity, prefix = PrefixAffinity(), text(0, 6 * BLOCK)
    affinity.record("a", prefix, b"", IDLE)
    affinity.keep(["b"])
    assert affinity._num_matched("a", IDLE, block_hashes(prefix, b"")) == 0


def test_a_conversation_stays_with_its_engine_while_it_grows() -> None:
    affinity, said = PrefixAffinity(), text(0, 3 * BLOCK)
    first = affinity.rank(said, b"", engines())[0]
    for turn in range(1, 6):
        affinity.record(first, said, b"", IDLE)
        said += text(turn, 2 * BLOCK)
        assert affinity.rank(said, b"", engines())[0] == first


MANY = tuple(f"engine-{number}" for number in range(10 * MAX_COMPARED))


def of_many(seed: int = 0) -> PrefixAffinity:
    affinity = PrefixAffinity(random.Random(seed))
    affinity.keep(MANY)
    return affinity


def choose(affinity: PrefixAffinity, prompt: tuple[int, ...], load: Counter[str]) -> str:
    """Send a prompt to the best of the candidates, and count it."""
    names = affinity.candidates(prompt, b"")
    states = {name: EngineState(requests=load[name], max_running=8) for name in names}
    chosen = affinity.rank(prompt, b"", states)[0]
    affinity.record(chosen, prompt, b"", IDLE)
    load[chosen] += 1
    return chosen


def test_few_engines_are_all_candidates_and_of_many_a_bounded_number_is() -> None:
    affinity = PrefixAffinity()
    affinity.keep(NAMES)
    assert set(affinity.candidates(text(0, 100), b"")) == set(NAMES)
    many, prompt = of_many(), text(0, 40 * BLOCK)
    for number, name in enumerate(MANY[:35]):
        many.record(name, prompt[: (36 - number) * BLOCK + 1], b"", IDLE)
    assert NUM_HASHED < len(many.candidates(prompt, b"")) <= MAX_COMPARED


def test_of_many_engines_a_conversation_finds_its_own_and_new_prompts_spread() -> None:
    affinity, load, said = of_many(), Counter[str](), text(0, 3 * BLOCK)
    first = choose(affinity, said, load)
    for seed in range(1, len(MANY)):
        choose(affinity, text(seed, 3 * BLOCK), load)
    assert max(load.values()) <= 3  # one each, if all were compared
    assert choose(affinity, said + text(-1, BLOCK), Counter()) == first


def test_of_many_idle_engines_every_gateway_takes_the_same() -> None:
    prompts = [text(seed, 100) for seed in range(50)]
    one, other = ([choose(of_many(seed), each, Counter()) for each in prompts] for seed in (1, 2))
    assert one == other
    assert len(set(one)) > 40


def test_a_prefix_that_all_share_is_not_kept_to_the_engines_it_hashes_to() -> None:
    affinity, load, prefix = of_many(), Counter[str](), text(0, 2 * BLOCK)
    for seed in range(2 * len(MANY)):
        choose(affinity, prefix + text(seed, BLOCK), load)
    assert len(load) > 0.6 * len(MANY)
    assert max(load.values()) <= 8


def test_of_many_engines_one_that_is_gone_is_no_candidate() -> None:
    affinity, prefix = of_many(), text(0, 6 * BLOCK)
    affinity.record(MANY[0], prefix, b"", IDLE)
    assert affinity.candidates(prefix, b"")[0] == MANY[0]
    affinity.keep(MANY[1:])
    assert MANY[0] not in affinity.candidates(prefix, b"")
    assert not affinity._last_holders


def test_holders_are_dropped_with_the_blocks_that_an_engine_has_no_more() -> None:
    affinity = of_many()
    small = EngineState(max_running=8, cached_tokens=6 * BLOCK)
    for seed in range(20):
        affinity.record(MANY[0], text(seed, 4 * BLOCK + 1), b"", small)
    assert len(affinity._last_holders) == 6
    affinity.record(MANY[0], text(0, BLOCK + 1), b"", EngineState(restarts=1))
    assert len(affinity._last_holders) == 1
