"""Ray's LLM probes that fail, or are left out, each with the reason why."""

from __future__ import annotations

from tests.conformance.suites.selection import Exceptions

BASIC, FORMATS = "test_basic.py", "test_json_mode.py::test_response_format_options"

EXCEPTIONS = Exceptions(
    left_out={"texts of a larger model": ("test_exact_correctness.py::test_counting_pattern",)},
    different={
        "the error of an unknown model has other words": (f"{BASIC}::test_non_existent_model",),
        "bytes are the text's, and a special token has none": (f"{BASIC}::test_logprobs",),
        "a schema is an object, not a text with one": tuple(
            f"{FORMATS}[{stream}-response_format{number}-smollm2]"
            for stream in (True, False)
            for number in (2, 4)
        ),
    },
    left_out_parameters={"NOTSET": "a model for pictures, completions alone or adapters"},
)
