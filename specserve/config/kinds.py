"""Values that several sections of the config share: kinds of drafters, dtypes and devices."""

from __future__ import annotations

from specserve.config.fields import FieldRule

DTYPES = ("auto", "bfloat16", "float16", "float32")
NGRAM_KINDS = ("unigram", "bigram", "prompt_copy", "max_gram", "random")  # need no model
CASCADE_KINDS = ("vertical", "horizontal", "cascade")


def device_name() -> FieldRule:
    def read(value: object, key: str) -> str:
        if isinstance(value, str) and (
            value in ("auto", "cpu", "cuda")
            or (value.startswith("cuda:") and value[5:].isdecimal())
        ):
            return value
        raise ValueError

    return FieldRule("auto, cpu, cuda or cuda:N", read)
