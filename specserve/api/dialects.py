"""Parameters of other servers: the values that change nothing here, and what to send instead.

Names that a body has itself are in schema.py and chat_schema.py. Knows no pydantic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specserve.errors import BadValue

NUMBER, TEXT, LIST = (int, float), (str,), (list,)


@dataclass(frozen=True, slots=True)
class ForeignParameter:
    """A parameter of another server.

    Its `neutral` values change nothing here, and neither do values of `neutral_types`: values of a
    parameter that belongs to another one, which is refused unless it is off.
    """

    neutral: tuple[object, ...] = ()
    neutral_types: tuple[type, ...] = ()
    instead: str = ""  # what to send, or what holds here

    def check(self, name: str, value: object) -> None:
        """Raise BadValue for a value that asks for something."""
        if value is None or is_neutral(value, self.neutral):
            return
        if isinstance(value, self.neutral_types) and not isinstance(value, bool):
            return
        instead = f": {self.instead}" if self.instead else ""
        raise BadValue(f"{name} is not supported{instead}", param=name)


def is_neutral(value: object, neutral: Iterable[object]) -> bool:
    """Return True if the value is one of them; true is not 1, and 1.0 is."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _off(*neutral: object, instead: str = "") -> ForeignParameter:
    return ForeignParameter(neutral, instead=instead)


def _beside(*types: type) -> ForeignParameter:
    return ForeignParameter(neutral_types=types)


VLLM: Mapping[str, ForeignParameter] = {
    "use_beam_search": _off(False),
    "length_penalty": _off(1),
    "early_stopping": _off(False),
    "logits_processors": _off([]),
    "spaces_between_special_tokens": _off(True, False),
    "chat_template": _off(instead="the model's own template is used"),
    "documents": _off([]),
    "mm_processor_kwargs": _off({}),
    "guided_decoding_backend": _off("auto", "guidance"),
    "guided_whitespace_pattern": _off(instead="send x-guidance in the schema"),
    "structural_tag": _off(instead="send structured_outputs"),
    "return_tokens_as_token_ids": _off(False, instead="send return_token_ids"),
    "kv_transfer_params": _off({}),
    "vllm_xargs": _off({}),
    "prompt_embeds": _off(instead="send a prompt of text or token ids"),
}
LLAMA_CPP: Mapping[str, ForeignParameter] = {
    "dynatemp_range": _off(0),
    "dynatemp_exponent": _beside(*NUMBER),
    "n_indent": _off(0),
    "n_keep": _off(0, -1, instead="send truncate_prompt_tokens"),
    "n_discard": _off(0),
    "typical_p": _off(1),
    "tfs_z": _off(1),
    "penalize_nl": _off(True),
    "dry_multiplier": _off(0),
    "dry_base": _beside(*NUMBER),
    "dry_allowed_length": _beside(*NUMBER),
    "dry_penalty_last_n": _beside(*NUMBER),
    "dry_sequence_breakers": _beside(*LIST),
    "xtc_probability": _off(0),
    "xtc_threshold": _beside(*NUMBER),
    "mirostat": _off(0),
    "mirostat_tau": _beside(*NUMBER),
    "mirostat_eta": _beside(*NUMBER),
    "top_n_sigma": _off(-1, 0),
    "min_keep": _off(0, 1),
    "n_probs": _off(0, instead="send logprobs"),
    "n_cmpl": _off(1, instead="send n"),
    "t_max_predict_ms": _off(0, -1),
    "t_max_prompt_ms": _off(0, -1),
    "image_data": _off([]),
    "id_slot": _off(-1),
    "slot_id": _off(-1),
    "return_tokens": _off(False, instead="send return_token_ids"),
    "samplers": _off([], instead="their order is fixed here"),
    "timings_per_token": _off(False),
    "return_progress": _off(False),
    "post_sampling_probs": _off(False),
    "response_fields": _off([]),
    "lora": _off([]),
    "grammar_lazy": _off(False),
    "grammar_triggers": _off([]),
    "preserved_tokens": _off([]),
    "parse_tool_calls": _off(True),
    "speculative.n_max": _off(instead="send speculation with gamma"),
    "speculative.n_min": _off(0),
    "speculative.p_min": _off(0),
}
OLLAMA: Mapping[str, ForeignParameter] = {
    "keep_alive": _beside(*NUMBER, *TEXT),  # the model stays loaded
    "options": _off({}, instead="send its members as parameters of their own"),
    "format": _off("", instead="send response_format"),
    "raw": _off(False),
    "template": _off("", instead="the model's own template is used"),
    "system": _off("", instead="send a message of the role system"),
    "context": _off([]),
    "images": _off([]),
    "num_ctx": _off(instead="the server's limits.max_context holds"),
    "num_predict": _off(instead="send max_tokens"),
    "think": _off(instead="send chat_template_kwargs, if the model's template has a switch"),
}
SGLANG: Mapping[str, ForeignParameter] = {
    "ebnf": _off(instead="send guided_grammar"),
    "regex": _off(instead="send guided_regex"),
    "no_stop_trim": _off(False, instead="send include_stop_str_in_output"),
    "rid": _off(instead="send request_id"),
    "lora_path": _off(""),
    "session_params": _off({}),
    "return_hidden_states": _off(False),
    "return_routed_experts": _off(False),
    "return_cached_tokens_details": _off(False),
    "custom_logit_processor": _off(""),
    "custom_params": _off({}),
    "extra_key": _off("", instead="send cache_salt"),
    "data_parallel_rank": _off(),
}
TGI: Mapping[str, ForeignParameter] = {
    "do_sample": _off(True, instead="send temperature 0"),
    "max_new_tokens": _off(instead="send max_tokens"),
    "truncate": _off(instead="send truncate_prompt_tokens"),
    "watermark": _off(False),
    "details": _off(False),
    "decoder_input_details": _off(False),
    "return_full_text": _off(False, instead="send echo"),
    "top_n_tokens": _off(0, instead="send top_logprobs"),
    "adapter_id": _off(""),
    "tool_prompt": _off(""),
    "guideline": _off(""),
}
TRANSFORMERS: Mapping[str, ForeignParameter] = {  # and what text-generation-webui adds
    "num_beams": _off(1),
    "num_beam_groups": _off(1),
    "diversity_penalty": _off(0),
    "no_repeat_ngram_size": _off(0),
    "encoder_repetition_penalty": _off(1),
    "guidance_scale": _off(1),
    "negative_prompt": _off(""),
    "penalty_alpha": _off(0),
    "epsilon_cutoff": _off(0),
    "eta_cutoff": _off(0),
    "top_a": _off(0),
    "tfs": _off(1),
    "smoothing_factor": _off(0),
    "smoothing_curve": _beside(*NUMBER),
    "dynamic_temperature": _off(False),
    "dynatemp_low": _beside(*NUMBER),
    "dynatemp_high": _beside(*NUMBER),
    "temperature_last": _off(False),
    "mirostat_mode": _off(0),
    "min_length": _off(0),
    "min_new_tokens": _off(0),
    "max_time": _off(),
    "use_cache": _off(True),
    "add_bos_token": _off(True),
    "ban_eos_token": _off(False, instead="send ignore_eos"),
    "custom_token_bans": _off("", instead="send logit_bias"),
    "truncation_length": _off(0, instead="send truncate_prompt_tokens"),
    "repetition_penalty_range": _off(0),
    "auto_max_new_tokens": _off(False),
    "num_return_sequences": _off(1, instead="send n"),
}
HOSTED: Mapping[str, ForeignParameter] = {  # Mistral, Fireworks, Together, OpenRouter and others
    "safe_prompt": _off(False),
    "random_seed": _off(instead="send seed"),
    "context_length_exceeded_behavior": _off("error", instead="send truncate_prompt_tokens"),
    "prompt_truncate_len": _off(instead="send truncate_prompt_tokens"),
    "raw_output": _off(False),
    "perf_metrics_in_response": _off(False),
    "echo_last": _off(0),
    "transforms": _off([]),
    "models": _off([]),
    "provider": _off({}),
    "plugins": _off([]),
    "usage": _off({"include": False}, instead="send stream_options with include_usage"),
    "thinking": _off(instead="send chat_template_kwargs, if the model's template has a switch"),
    "enable_thinking": _off(
        instead="send chat_template_kwargs, if the model's template has a switch"
    ),
    "prompt_cache_retention": _beside(*TEXT),  # how long pages stay is the server's own choice
}
SERVERS: Mapping[str, Mapping[str, ForeignParameter]] = {
    "vLLM": VLLM,
    "llama.cpp": LLAMA_CPP,
    "Ollama": OLLAMA,
    "SGLang": SGLANG,
    "TGI": TGI,
    "transformers and text-generation-webui": TRANSFORMERS,
    "hosted services": HOSTED,
}
DIALECTS: Mapping[str, ForeignParameter] = {
    name: parameter for names in SERVERS.values() for name, parameter in names.items()
}
