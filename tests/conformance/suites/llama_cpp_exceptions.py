"""The tests of llama.cpp's server that are not run, and those that fail for a known reason."""

from __future__ import annotations

from tests.conformance.suites.selection import Exceptions

EXCEPTIONS = Exceptions(
    left_out={
        "asks for a path of llama.cpp alone": (
            "test_completion.py::test_completion_parallel_slots",
            "test_completion.py::test_completion_unified",
            "test_completion.py::test_completion_with_tokens_input",
            "test_completion.py::test_logit_bias",
        ),
        "the program's own options or tools": (
            "test_kv_keep_only_active.py",
            "test_basic.py::test_server_multiple_addresses",
            "test_basic.py::test_no_ui",
            "test_basic.py::test_server_model_aliases_and_tags",
            "test_chat_completion.py::test_chat_template",
            "test_chat_completion.py::test_chat_template_assistant_prefill",
            "test_chat_completion.py::test_chat_template_continue_final_message_vllm_compat",
            "test_chat_completion.py::test_verbose_debug",
            "test_mcp_servers.py",
            "test_proxy.py",
            "test_router.py",
            "test_sleep.py",
            "test_stream.py",
            "test_tools_builtin.py",
            "test_security.py::test_access_static_assets_without_api_key",
            "test_security.py::test_cors_origins_localhost_reflects",
            "test_security.py::test_cors_origins_localhost_rejects",
            "test_metrics.py::test_metrics_disabled",
        ),
        "embeddings, reranking, pictures or adapters": (
            "test_embedding.py",
            "test_rerank.py",
            "test_vision_api.py",
            "test_lora.py",
            "test_security.py::test_local_media_file",
            "test_metrics.py::test_metrics_embedding_prompt_is_counted",
            "test_compat_anthropic.py::test_anthropic_vision_base64_with_multimodal_model",
            "test_compat_anthropic.py::test_anthropic_tool_result_with_image",
        ),
        "slots saved and restored": ("test_slot_save.py",),
        "downloads a model": (
            "test_speculative.py",
            "test_compat_anthropic.py::test_anthropic_thinking_with_reasoning_model",
            "test_completion.py::test_completion_stream_with_openai_library_stops",
            "test_infill.py::test_with_qwen_model",
            "test_tool_call.py::test_completion_with_required_tool_real_model",
            "test_tool_call.py::test_completion_without_tool_call_slow",
            "test_tool_call.py::test_weather",
            "test_tool_call.py::test_calc_result",
            "test_tool_call.py::test_thoughts",
            "test_tool_call.py::test_hello_world",
        ),
        "texts or token counts of another model": (
            "test_compat_anthropic.py::test_anthropic_thinking_history_in_count_tokens",
            "test_chat_completion.py::test_chat_completion",
            "test_chat_completion.py::test_chat_completion_cached_tokens",
            "test_chat_completion.py::test_chat_completion_stream",
            "test_chat_completion.py::test_chat_completion_with_openai_library",
            "test_completion.py::test_completion_with_openai_library",
            "test_completion.py::test_completion_stream_with_openai_library",
            "test_compat_oai_responses.py::test_responses_with_openai_library",
            "test_compat_oai_responses.py::test_responses_stream_with_openai_library",
        ),
        "a parameter or field of llama.cpp alone": (
            "test_chat_completion.py::test_chat_completion_with_timings_per_token",
            "test_chat_completion.py::test_return_progress",
            "test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry",
            "test_tokenize.py",
            "test_chat_completion.py::test_logit_bias",
        ),
    },
    different={
        "thinking is refused of a model that does not reason": (
            "test_compat_anthropic.py::test_anthropic_thinking",
        ),
        "pictures are refused with 400, not 500": (
            "test_compat_anthropic.py::test_anthropic_vision_format_accepted",
        ),
        "a conversation has a message, as in Anthropic's API": (
            "test_compat_anthropic.py::test_anthropic_empty_messages",
        ),
        "a schema needs its name, as in OpenAI's API": (
            "test_chat_completion.py::test_completion_with_response_format"
            '[response_format2-10-"foooooo"]',
        ),
        "the model's template takes two answers in a row": (
            "test_chat_completion.py::test_invalid_chat_completion_req[messages7]",
        ),
        "the first event of a stream may have text": (
            "test_chat_completion.py::test_logprobs_stream",
        ),
        "the error of a full context is OpenAI's": (
            "test_chat_completion.py::test_context_size_exceeded",
            "test_chat_completion.py::test_context_size_exceeded_stream",
        ),
        "id_slot is refused: pages are found by their tokens": (
            "test_chat_completion.py::test_chat_completions_multiple_choices",
        ),
    },
)
