"""The tests of vLLM that are not run, and those that fail for a known reason."""

from __future__ import annotations

from tests.conformance.suites.selection import Exceptions

COMPLETION = "openai/completion/test_completion.py"
COMPLETION_ERROR = "openai/completion/test_completion_error.py"
PROMPT = "openai/completion/test_prompt_validation.py"
CHAT = "openai/chat_completion/test_chat.py"
CHAT_ERROR = "openai/chat_completion/test_chat_error.py"
CHAT_COMPLETION = "openai/chat_completion/test_chat_completion.py"
LOGIT_BIAS = "openai/chat_completion/test_chat_logit_bias_validation.py"
STREAM = "openai/chat_completion/test_stream_processor.py"

LIST_LIMIT = f"{COMPLETION_ERROR}::TestCompletionPromptListLimit"
FUNCTIONS = "openai/chat_completion/test_completion_with_function_calling.py"
ECHO = "openai/chat_completion/test_chat_echo.py"

EXCEPTIONS = Exceptions(
    left_out={
        "a model that reasons": (f"{FUNCTIONS}::test_function_tool_use",),
        "pictures": (f"{CHAT_ERROR}::test_user_message_accepts_image",),
        "a path of SageMaker": (f"{CHAT}::test_invocations",),
        "prompts as embeddings": (
            "openai/chat_completion/test_chat_completion_with_prompt_embeds.py",
            "openai/completion/test_completion_with_prompt_embeds.py",
            f"{PROMPT}::test_load_prompt_embeds",
            f"{PROMPT}::test_disable_prompt_embeds",
            f"{LIST_LIMIT}::test_oversized_prompt_embeds_list_rejected",
            f"{LIST_LIMIT}::test_bounded_prompt_embeds_list_allowed",
        ),
        "a parameter of vLLM alone": (
            f"{ECHO}::test_chat_session_with_echo_and_continue_final_message",
            "openai/test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs",
            "openai/test_return_tokens_as_ids.py",
            "openai/chat_completion/test_include_reasoning.py",
            "openai/chat_completion/test_message_assembly.py::test_include_reasoning",
            f"{STREAM}::test_hidden_reasoning_hides_metadata_only_with_a_parser",
            f"{CHAT_COMPLETION}::test_kv_transfer_prompt_token_ids_round_trip",
            f"{CHAT_COMPLETION}::test_kv_transfer_prompt_token_ids_streaming",
            "openai/chat_completion/test_batched_chat_completions.py",
            "openai/chat_completion/test_logprob_token_ids.py",
            "openai/chat_completion/test_thinking_token_budget.py",
            "openai/chat_completion/test_thinking_token_budget_validation.py",
            f"{COMPLETION}::test_logprob_token_ids",
            f"{COMPLETION}::test_logprob_token_ids_stream",
            f"{COMPLETION}::test_completion_request_forwards_routed_experts_prompt_start",
        ),
        "an option or a variable of vLLM's server": (
            "serve/instrumentator/test_basic.py::test_show_version",
            "serve/instrumentator/test_basic.py::test_server_load",
            f"{CHAT}::test_chat_completion_request_n_parameter_at_limit",
            f"{CHAT}::test_chat_completion_request_n_parameter_custom_limit",
            f"{CHAT}::test_chat_completion_request_n_parameter_exceeds_default_limit",
            f"{LIST_LIMIT}::test_oversized_text_prompt_list_rejected",
            f"{LIST_LIMIT}::test_oversized_token_id_prompt_list_rejected",
            f"{LIST_LIMIT}::test_one_over_limit_rejected",
            "openai/completion/test_token_in_token_out.py",
            "openai/chat_completion/test_root_path.py",
            "openai/chat_completion/test_enable_force_include_usage.py",
        ),
        "calls vLLM's own classes": (
            f"{CHAT}::test_null_top_logprobs_is_same_as_omitted",
            f"{CHAT}::test_chat_completion_request_n_parameter_massive_value",
            f"{COMPLETION_ERROR}::test_completion_per_request_metrics_suppressed"
            "_for_multiple_prompts",
            "openai/completion/test_completion_text_offset.py",
        ),
        "beam search": (
            f"{COMPLETION}::test_batch_completions",
            f"{COMPLETION_ERROR}::test_beam_search_echo_logprobs_rejected",
        ),
        "adapters of another model": (
            "openai/completion/test_lora_resolvers.py",
            "openai/models/test_models.py",
        ),
        "another model": (
            "openai/chat_completion/test_extra_content_fields.py",
            "openai/chat_completion/test_serving_chat.py",
            "openai/completion/test_tensorizer_entrypoint.py",
        ),
        "texts or token counts of a larger model": (
            "openai/test_return_token_ids.py::test_chat_completion_with_tool_use",
            f"{FUNCTIONS}::test_named_tool_use",
            f"{CHAT}::test_structured_outputs_json_chat",
            f"{CHAT}::test_response_format_json_object",
            f"{CHAT}::test_response_format_json_schema",
            f"{CHAT}::test_complex_message_content",
            f"{CHAT}::test_structured_outputs_choice_chat",
            f"{CHAT}::test_single_chat_session",
            f"{CHAT}::test_more_than_one_prompt_logprobs_chat",
        ),
    },
    different={
        "times of a request are in specserve, under other names": (
            f"{CHAT_COMPLETION}::test_per_request_metrics_non_streaming",
            f"{CHAT_COMPLETION}::test_per_request_metrics_on_final_usage_chunk",
        ),
        "roles and efforts are OpenAI's": (
            f"{CHAT}::test_custom_role",
            f"{CHAT}::test_chat_completion_request_accepts_model_specific_reasoning_effort",
        ),
        "a seed may have up to 64 bits without a sign": (f"{CHAT}::test_long_seed",),
        "refused with 400, in other words": (
            f"{CHAT_ERROR}::test_json_schema_response_format_missing_schema",
            f"{CHAT_ERROR}::test_structural_tag_response_format_invalid",
            f"{CHAT_ERROR}::test_structured_outputs_structural_tag_invalid",
            f"{CHAT_ERROR}::test_deeply_nested_structural_tag_rejected",
            f"{CHAT_ERROR}::test_non_numeric_logprobs_rejected",
            f"{LOGIT_BIAS}::test_chat_logit_bias_invalid",
            f"{LOGIT_BIAS}::test_chat_logit_bias_multiple_non_integer_keys",
            f"{CHAT}::test_chat_completion_request_rejects_unknown_reasoning_effort",
            f"{COMPLETION_ERROR}::test_json_schema_response_format_missing_schema",
            f"{COMPLETION_ERROR}::test_structural_tag_response_format_invalid",
            f"{COMPLETION_ERROR}::test_structured_outputs_structural_tag_invalid",
            f"{COMPLETION_ERROR}::test_negative_prompt_token_ids_nested",
            f"{COMPLETION_ERROR}::test_negative_prompt_token_ids_flat",
            f"{COMPLETION_ERROR}::test_logprobs_below_minus_one_rejected",
            f"{COMPLETION_ERROR}::test_non_numeric_logprobs_rejected",
            f"{PROMPT}::test_empty_prompt",
            f"{PROMPT}::test_out_of_vocab_token_ids",
        ),
        "what was not requested is absent, not null": (
            "openai/test_return_token_ids.py::test_basic_completion_with_emoji[False]",
            "openai/test_return_token_ids.py::test_basic_completion_with_emoji[None]",
            f"{COMPLETION}::test_single_completion",
            f"{COMPLETION}::test_prompt_logprobs_completion[Qwen/Qwen3-0.6B-None]",
            f"{CHAT}::test_prompt_logprobs_chat[HuggingFaceH4/zephyr-7b-beta-None]",
        ),
        "truncation_side is refused: the end of a prompt is kept": (
            f"{COMPLETION}::test_completion_truncation_side_controls_prompt_truncation",
        ),
        "an echoed prompt leaves special tokens out, as skip_special_tokens has it": (
            f"{COMPLETION}::test_echo_logprob_completion",
        ),
        "at most 20 logprobs a token, -1 is refused": (
            f"{ECHO}::test_prompt_logprobs",
            f"{ECHO}::test_top_logprobs",
            f"{COMPLETION_ERROR}::test_logprobs_minus_one_allowed",
        ),
    },
    left_out_parameters={"zephyr-lora": "adapters of another model"},
)
