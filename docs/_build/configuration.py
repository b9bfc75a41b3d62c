"""Reference page of the configuration: keys, defaults, ranges and meanings.

Defaults and ranges are those that `specserve/config/sections.py` declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from docs._build.table import code, table
from specserve.config.cascade import StageConfig
from specserve.config.fields import FieldRule
from specserve.config.tree import Config

INTRODUCTION = """# Configuration

One tree serves `specserve serve --config FILE` (YAML), `--set a.b=c`, `LLM(**{"a.b": c})` and
`args:` in the files of `serve deploy`. The page is made from `specserve/config/sections.py` when
the site is built. An unknown key is an error that names the nearest known key; null means the
default.
"""
STAGE = "draft.stages[i]"


@dataclass(frozen=True, slots=True)
class Key:
    """Key of the tree, by its dotted name."""

    name: str
    default: object
    expects: str


def page() -> str:
    listed = list(all_keys())
    sections = dict.fromkeys(key.name.rpartition(".")[0] for key in listed)
    parts = [
        INTRODUCTION,
        *(
            _section(section, [key for key in listed if key.name.rpartition(".")[0] == section])
            for section in sections
        ),
    ]
    return "\n".join(parts)


def all_keys() -> Iterator[Key]:
    """Yield every key of a config; a stage's keys stand below `draft.stages[i]`."""
    yield from _keys(Config, "")
    yield from _keys(StageConfig, STAGE)


def _keys(kind: type[Any], path: str) -> Iterator[Key]:
    blank = kind()
    for field in fields(kind):
        rule: FieldRule = field.metadata["rule"]
        name = f"{path}.{field.name}" if path else field.name
        if rule.keys is None:
            yield Key(name, getattr(blank, field.name), rule.expects)
        else:
            yield from _keys(rule.keys, name)


def _section(section: str, listed: list[Key]) -> str:
    rows = [
        (code(key.name.rpartition(".")[2]), _default(key), key.expects, MEANINGS[key.name])
        for key in listed
    ]
    return f"## {code(section) if section else 'At the top'}\n\n" + table(
        ("key", "default", "takes", "meaning"), rows
    )


def _default(key: Key) -> str:
    """Return a key's default; the word for no value, as `auto`, is one too."""
    word, is_word, _ = key.expects.partition(", or ")
    if key.default in (None, "", (), {}):
        return code(word) if is_word and key.default is None else ""
    return code(
        str(key.default).lower()
        if isinstance(key.default, bool)
        else list(key.default)
        if isinstance(key.default, tuple)
        else key.default
    )


MEANINGS: Mapping[str, str] = {
    "model": "Name shown to clients. The default is the last part of `target.path`.",
    "name": "Name of the application in Ray, for `specserve serve`; files of `serve deploy` say it "
    "themselves. The default is `specserve-<model>-<port>`.",
    "models": "Several models behind the same gateways: a list of entries with a `name` and any of "
    "`target`, `draft`, `demo`, `adapters`, `speculation`, `cache`, `weights`, `limits`, "
    "`replicas` and `faults` ([how](../guides/deploying.md#several-models)). The last six may also "
    "stand at the top level, for all models; an entry's keys win.",
    "target.path": "Target model: a directory, a GGUF file or a hub name. The default is the demo "
    "pair.",
    "target.revision": "Revision of a hub name: the 40 digits of a commit, since a branch or a tag "
    "may change ([supply chain](../guides/security.md#supply-chain)).",
    "target.dtype": "`auto` is bfloat16 where the processor has it, else float32.",
    "target.tensor_parallel": "Number of ranks, each on a device of its own.",
    "target.degree_invariant": "Gives the bits of one rank at every `tensor_parallel`, on CPUs in "
    "bfloat16. Ranks exchange more; models with experts are refused.",
    "target.device": "`auto` is a GPU where there is one.",
    "target.threads": "CPU threads of a rank; the default is torch's.",
    "target.attention": "`invariant` gives the same bits whatever shares the pass, by torch's "
    "products. `auto` is as invariant on CPUs: compiled where linear layers are, else `invariant`; "
    "on GPUs it is `flashinfer` where it is installed and right, else `sdpa`.",
    "target.sampling_defaults": "`model`: requests that do not name a temperature, `top_p`, "
    "`top_k`, `min_p` or `repetition_penalty` have that of the checkpoint's "
    "generation_config.json, where it has one. `none`: they are sampled at temperature 1, from "
    "all tokens.",
    "target.label_selector": "Labels that a node must have for Ray to place ranks there.",
    "draft.placement": "`together`: in the target's process, on its device; `apart`: on one "
    "of its own. `auto` measures both on CPUs when an engine starts, and is `apart` elsewhere, "
    "or `together` where the cluster has no GPU for the draft "
    "([how](../design/drafters.md#apart-or-together)).",
    "draft.kind": "Drafter ([the kinds](../guides/your-model.md)). The default is `neural` if "
    "there is a path, else `none`.",
    "draft.path": "Draft model, EAGLE-3 head, tables made by `specserve tables`, or heads made by "
    "`specserve heads`. A model may have another tokenizer than the target.",
    "draft.revision": "As `target.revision`.",
    "draft.quantize": "`int8`, `int4`, or `fp8` on GPUs, rounds a neural draft's weights as they "
    "are read; the text stays the target's "
    "([what it gains](../guides/your-model.md#a-quantised-draft)).",
    "draft.skip": "Layers that `layer_skip` leaves out. The default is every second one between "
    "the first and the last.",
    "draft.learn": "Whether tables count the served texts. The default is yes if no tables are "
    "given.",
    "draft.dtype": "As `target.dtype`.",
    "draft.device": "As `target.device`.",
    "draft.threads": "As `target.threads`.",
    "draft.num_gpus": "GPUs that Ray reserves for the draft worker; a fraction shares one.",
    "draft.label_selector": "As `target.label_selector`.",
    "draft.support": "Number of most likely tokens that the draft samples from. Their "
    "probabilities are sent with the proposal.",
    "draft.stages": "Stages of a cascade, from the largest drafter to the smallest.",
    "draft.k": "`k[i][j]`: tokens that the target (i = 0) or the stage before stage i requests "
    "from stage j ([cascades](../design/drafters.md)).",
    "draft.lenience": "Lenience of reviews between stages: one number, or one for each stage "
    "that reviews. The text stays exact.",
    "draft.pool.name": "Name of a pool of drafts that the engines share, instead of one draft each "
    "([draft pools](../guides/deploying.md#draft-pools)). Models that name one share it.",
    "draft.pool.devices": "Number of drafts in the pool, each on a device of its own; with "
    "`max_devices` the fewest.",
    "draft.pool.max_devices": "Most drafts in the pool, which grows and shrinks with its load. The "
    "default is `draft.pool.devices`: their number is fixed.",
    "draft.pool.devices_per_engine": "Number of devices that draft for one engine, each for some "
    "of its sequences: for those that begin with what its cache holds.",
    "draft.pool.target_busy": "Share of its time that a draft of a pool should work for; above, "
    "the pool grows.",
    "draft.pool.targets": "Largest number of engines that share them. The default is "
    "`replicas.max`, of all models that name the pool together.",
    f"{STAGE}.kind": "Drafter of this stage.",
    f"{STAGE}.path": "Its model or its tables.",
    f"{STAGE}.revision": "As `target.revision`.",
    f"{STAGE}.dtype": "The default is the draft's.",
    f"{STAGE}.device": "The default is the draft's.",
    f"{STAGE}.support": "The default is the draft's.",
    f"{STAGE}.learn": "As `draft.learn`.",
    "speculation.verifier": "How draft tokens are verified ([exactness](../design/exactness.md)). "
    "`auto` is `coupled` for requests with a seed, and `block` for others.",
    "speculation.gamma": "Draft tokens a round. `auto` lets the pacer choose; 0 is plain decoding.",
    "speculation.max_gamma": "Largest gamma that the pacer or a request may choose.",
    "speculation.anticipation.enabled": "Whether the draft prepares proposals while the target "
    "verifies.",
    "speculation.anticipation.fanout": "Continuations prepared at each position. `auto` prepares "
    "as many as pay.",
    "speculation.lenience": "Lenience of the verifier `lenient`. Above 1 it is lossy, and every "
    "response says so.",
    "cache.page_size": "Positions in a page of the KV cache.",
    "cache.memory_fraction": "Share of the memory beside the weights that the KV cache may take. "
    "The default is half.",
    "cache.pages": "Number of pages, instead of a share of memory.",
    "cache.prefix_caching": "Whether prompts with the same prefix share pages.",
    "cache.shared": "Whether prompts of different API keys share pages. The time to the first "
    "token then reveals to one client whether another has sent the same prefix.",
    "cache.dtype": "Number format of the target's pages. `auto` is FP8 on GPUs where the "
    "checkpoint says so, else the model's; `fp8` is for GPUs, half of bf16's bytes "
    "([what it does](../guides/your-model.md#a-kv-cache-in-fp8)).",
    "demo.size": "Parameters of the demo's target, which is widened to that size: the same texts "
    "at the cost of a larger model. `none`: as it ships. The commands widen it to 200M where "
    "3 GiB of memory are free.",
    "weights.shared": "Whether the processes of a node share packed weights in memory, on CPUs "
    "([operating](../guides/operating.md#shared-weights)). `auto` is yes in servers, no in `LLM`.",
    "weights.directory": "Private directory for their files; they then stay until removed. The "
    "default is in `/dev/shm`, which is memory.",
    "weights.kernel": "Linear layers on CPUs, and attention with them: `compiled` for the "
    "processor, which needs AVX-512 with bf16 and `specserve[cpu]`, or oneDNN's. `auto` is "
    "`compiled` where it runs.",
    "adapters.paths": "Directories of adapters by name: low-rank adapters (LoRA) of the target in "
    "PEFT's layout ([adapters](../guides/adapters.md)). Each must lie there on every node of the "
    "target, and on those of gateways.",
    "adapters.memory_mb": "Memory of each rank for loaded adapters; of those that no sequence of a "
    "pass needs, the least recently used is evicted first.",
    "adapters.load_from": "Directory below which adapters may be loaded while the server runs.",
    "limits.max_context": "Prompt and continuation together. The default is the model's own.",
    "limits.max_running": "Sequences in a round, per engine.",
    "limits.max_queued": "Requests that wait beyond those, per engine; more get 429.",
    "limits.max_batch_tokens": "Positions in a pass of the target: decoding sequences, draft "
    "tokens and prompts together ([limits](../guides/limits.md#a-round)). `auto` takes what the "
    "hardware computes in 0.2 s.",
    "limits.request_timeout_s": "Time after which a request is answered with 408, or its stream "
    "ends with an error.",
    "limits.max_body_bytes": "Largest request body; a larger one gets 413.",
    "replicas.min": "Smallest number of engines.",
    "replicas.max": "Largest number of engines.",
    "replicas.target_ongoing_requests": "Requests per engine above which another one starts.",
    "replicas.target_ttft_s": "Seconds to the first token that at most 5% of the requests may "
    "exceed. Engines measure up to how many requests they keep to it, and that number takes the "
    "place of `replicas.target_ongoing_requests` "
    "([scaling](../guides/operating.md#scaling-and-updates)).",
    "replicas.upscale_delay_s": "How long the load must be higher before an engine starts.",
    "replicas.downscale_delay_s": "How long the load must be lower before an engine stops.",
    "replicas.surge_percent": "Percentage of the engines, at least one, that an update starts "
    "before it stops old ones. The default is 25 if there is room.",
    "replicas.routing": "Which engine gets a request. `prefix`: the one that has its first token "
    "soonest, by what of its prompt it has cached and by how many requests it has. `queue`: the "
    "shorter queue of two engines, as Serve chooses by itself.",
    "replicas.gateways": "Largest number of gateways; they scale by streams and CPU, "
    "apart from the engines.",
    "replicas.min_gateways": "Smallest number of gateways. With two or more, the loss of one "
    "leaves others that answer until it is back.",
    "http.host": "Address for `specserve serve`; files of `serve deploy` say it in `http_options`.",
    "http.port": "Port for `specserve serve`; files of `serve deploy` say it in `http_options`.",
    "http.api_keys_file": "Names, keys and rates ([security](../guides/security.md#keys)). "
    "Without it, every client is served.",
    "http.hosts": "Hosts that requests may be addressed to, without ports; others are refused "
    "with 421. Without any, a server on the loopback that asks for no keys answers to `localhost`, "
    "`127.0.0.1` and `[::1]`, so that no page from elsewhere reaches it through a name of its own; "
    "other servers answer to any.",
    "http.open_paths": "Paths that need no key.",
    "http.cors_origins": "Other origins whose pages may send requests from a browser.",
    "http.root_path": "Path under which the server answers, such as `/my-model`. On a Ray cluster "
    "that several applications share, each has its own; elsewhere a proxy in front may strip it.",
    "http.unknown_parameters": "What becomes of parameters of a body that nothing knows: `refuse` "
    "with 400, `warn` in the log and in the header `X-Specserve-Ignored`, or `ignore` "
    "([HTTP](../guides/http.md#parameters-of-other-servers)).",
    "http.trusted_proxies": "How many proxies of yours in front of Serve's append to "
    "`X-Forwarded-For`; the access log then has the address that the outermost one saw "
    "([security](../guides/security.md#logs)). 0: the header is ignored.",
    "http.label_selector": "Labels of the nodes that gateways and board may run on. Clients' "
    "connections end with the node.",
    "http.vllm_metrics": "Whether `/metrics` has what vLLM measures, too, a second time under its "
    "names ([operating](../guides/operating.md#metrics)).",
    "http.tls_cert": "Certificate as a PEM file. With certificate and key, only https is served.",
    "http.tls_key": "Key that belongs to the certificate.",
    "logs.format": "`json` writes an object a line.",
    "logs.level": "Level of the lines that specserve writes.",
    "logs.prompts": "Whether lines may quote prompts.",
    "faults.round_deadline_s": "Time after which a round counts a rank as lost.",
    "faults.max_restarts": "Failed restarts in a row after which Serve replaces the replica.",
    "faults.max_slow_s": "Time for which most passes may be far slower than usual before the "
    "target is restarted. Not set: never.",
}
"""What a type and a range cannot say; tests/docs/test_generated_pages.py requires every key."""
