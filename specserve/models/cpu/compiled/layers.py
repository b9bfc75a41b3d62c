"""All layers of a Llama-shaped network in one call.

A team of threads goes through the stages of each layer together, and waits between two of them. The
stages are the functions that are also called one by one, so that the bits are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llvmlite import ir

from specserve.machine_code.teams import Record, Stage, Team, taking
from specserve.machine_code.vectors import (
    FLOAT,
    INT,
    LINE,
    LONG,
    POINTER,
    at,
    counting,
    new_function,
)
from specserve.models.cpu.compiled.attention import AttentionCode
from specserve.models.cpu.compiled.norms import Norms

LAYER_POINTERS = (
    *("norm_in", "qkv", "qkv_bias", "norm_q", "norm_k"),  # all but `qkv` may be null
    *("keys", "values", "out", "out_bias"),
    *("norm_mlp", "gate", "down", "down_bias"),
)
LAYER_WEIGHTS = ("qkv", "out", "gate", "down")
LAYER = Record(
    dict.fromkeys(LAYER_POINTERS, POINTER)
    | {"window": LONG}
    | {f"{weight}_{what}": LONG for weight in LAYER_WEIGHTS for what in ("kind", "span")}
)
"""What belongs to a layer."""

PASS_POINTERS = (
    "layers",
    "x",  # [rows, hidden] which becomes the result
    *("normed", "projected", "attended", "inner"),  # room for what stages leave to the next
    *("slots", "runs", "block_table", "rotary"),
    "counters",  # zeros, NUM_COUNTERS lines of the cache for each layer
    "places",  # zeros, an INT for each thread
)
PASS_NUMBERS = (
    *("num_layers", "rows", "num_runs", "table_width", "page_size"),
    *("hidden", "inner_size", "kv_heads", "shared", "dim", "v_dim"),
    "inputs",  # of `qkv`: those that `norm_in` makes, or what `normed` has where there is no norm
    *("normed_stride", "attended_stride", "inner_stride"),  # bytes of a row
)
PASS = Record(
    dict.fromkeys(PASS_POINTERS, POINTER)
    | dict.fromkeys(PASS_NUMBERS, LONG)
    | dict.fromkeys(("eps", "scaling"), FLOAT)
)
"""What belongs to a pass."""
NUM_COUNTERS = 18
"""For each stage what is taken of its work, and how many threads are done with it."""


def add_layers(
    module: ir.Module,
    team: Team,
    *,
    products: Mapping[str, Stage],
    attention: AttentionCode,
    norms: Norms,
) -> None:
    """Build `layers`, which takes a pass's record."""
    work, code = new_function(module, "work_on_layers", [POINTER])
    of_pass, size = PASS.load(code, work.args[0]), team.size(code)
    with counting(code, LONG(0), of_pass["num_layers"], LONG(1)) as index:
        layer = LAYER.load(
            code, at(code, of_pass["layers"], code.mul(index, LONG(LAYER.num_bytes)))
        )
        first = at(code, of_pass["counters"], code.mul(index, LONG(NUM_COUNTERS * LINE)))
        counters = iter([at(code, first, LONG(i * LINE)) for i in range(NUM_COUNTERS)])
        stages = _Stages(code, team, size, of_pass, counters)
        _add_layer(code, stages, layer, products, attention, norms)
    code.ret_void()
    function, code = new_function(module, "layers", [POINTER, INT], linkage="external")
    memory, threads = function.args
    team.run(code, work, memory, threads)
    code.ret_void()


class _Stages:
    """The stages of a layer, one after the other."""

    def __init__(
        self, code: Any, team: Team, size: Any, of_pass: Mapping[str, Any], counters: Any
    ) -> None:
        self._code, self._team, self._size = code, team, size
        self.of_pass, self._counters = of_pass, counters

    def counter(self) -> Any:
        return next(self._counters)

    def wait(self) -> None:
        self._team.wait(self._code, self.counter(), self.of_pass["places"], self._size)

    def run(self, stage: Stage, values: Mapping[str, Any]) -> None:
        record = stage.new_record(self._code, {**values, "next": self.counter()})
        self._code.call(stage.work, [record])
        self.wait()


def _add_layer(
    code: Any,
    stages: _Stages,
    layer: Mapping[str, Any],
    products: Mapping[str, Stage],
    attention: AttentionCode,
    norms: Norms,
) -> None:
    of_pass = stages.of_pass
    hidden, rows, shared, dim = (of_pass[name] for name in ("hidden", "rows", "shared", "dim"))
    queries = code.mul(of_pass["kv_heads"], shared)
    query_width = code.mul(queries, dim)
    kv_width = code.mul(of_pass["kv_heads"], dim)
    v_width = code.mul(of_pass["kv_heads"], of_pass["v_dim"])
    width = code.add(code.add(query_width, kv_width), v_width)
    row_bytes = code.mul(width, LONG(2))
    strides = {name: of_pass[f"{name}_stride"] for name in ("normed", "attended", "inner")}
    strides |= {"x": code.mul(hidden, LONG(2)), "projected": row_bytes}

    def norm(weight: str) -> None:
        values = {
            "x": of_pass["x"],
            "weight": layer[weight],
            "out": of_pass["normed"],
            "rows": rows,
            "width": hidden,
            "eps": of_pass["eps"],
            "out_stride": strides["normed"],
        }
        stages.run(norms.stage, values)

    def product(
        name: str, x: str, weight: str, out: str, inputs: Any, columns: Any, *, adds: bool = False
    ) -> None:
        bias = layer.get(f"{weight}_bias", POINTER(None))
        values = {
            "x": of_pass[x],
            "weight": layer[weight],
            "out": of_pass[out],
            "bias": bias,
            "residual": of_pass[out] if adds else POINTER(None),
            "rows": rows,
            "pairs": code.lshr(inputs, LONG(1)),
            "columns": columns,
            "kind": layer[f"{weight}_kind"],
            "span": layer[f"{weight}_span"],
            "x_stride": strides[x],
            "out_stride": strides[out],
        }
        stages.run(products[name], values)

    with code.if_then(code.icmp_unsigned("!=", layer["norm_in"], POINTER(None))):
        norm("norm_in")
    product("product", "normed", "qkv", "projected", of_pass["inputs"], width)
    k = at(code, of_pass["projected"], code.mul(query_width, LONG(2)))
    values = {
        "q": of_pass["projected"],
        "k": k,
        "v": at(code, k, code.mul(kv_width, LONG(2))),
        **{f"{name}_stride": row_bytes for name in "qkv"},
        **{name: layer[name] for name in ("keys", "values", "window")},
        **{name: of_pass[name] for name in ("slots", "runs", "block_table", "rotary")},
        **{name: of_pass[name] for name in ("num_runs", "table_width", "page_size", "kv_heads")},
        "shared": shared,
        "dim": dim,
        "v_dim": of_pass["v_dim"],
        "scaling": of_pass["scaling"],
        "out": of_pass["attended"],
        "out_stride": strides["attended"],
        "sinks": POINTER(None),
        "softcap": FLOAT(0.0),
    }
    _norm_heads(code, stages, layer, norms, values, queries)
    record = attention.stage.new_record(code, values)
    with taking(code, stages.counter(), LONG(1), of_pass["num_runs"]) as run:
        attention.add_write(code, record, run)
    stages.wait()
    stages.run(attention.stage, values)
    attended_width = code.mul(queries, of_pass["v_dim"])
    product("product", "attended", "out", "x", attended_width, hidden, adds=True)
    norm("norm_mlp")
    product("gated_product", "normed", "gate", "inner", hidden, of_pass["inner_size"])
    product("product", "inner", "down", "x", of_pass["inner_size"], hidden, adds=True)


def _norm_heads(
    code: Any,
    stages: _Stages,
    layer: Mapping[str, Any],
    norms: Norms,
    values: Mapping[str, Any],
    queries: Any,
) -> None:
    """Build the norms of query and key heads, where they are, if there are any."""
    counter, head_bytes = stages.counter(), code.mul(values["dim"], LONG(2))
    with code.if_then(code.icmp_unsigned("!=", layer["norm_q"], POINTER(None))):
        with taking(code, counter, LONG(1), stages.of_pass["rows"]) as row:
            for name, heads in (("q", queries), ("k", values["kv_heads"])):
                own = at(code, values[name], code.mul(row, values[f"{name}_stride"]))
                with counting(code, LONG(0), heads, LONG(1)) as head:
                    place = at(code, own, code.mul(head, head_bytes))
                    norms.add_norm(
                        code,
                        x=place,
                        weight=layer[f"norm_{name}"],
                        out=place,
                        width=values["dim"],
                        eps=stages.of_pass["eps"],
                    )
        stages.wait()
