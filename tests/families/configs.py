"""Tiny configs of deployed families, beside the configs of `tests.support.checkpoints`.

Each has what sets its family apart: multipliers, norms in other places, layers without rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma3Config,
    Gemma4Config,
    Gemma4TextConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    GraniteMoeConfig,
    Llama4Config,
    Mistral3Config,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.support.checkpoints import (
    ALTERNATING,
    GEMMA,
    GROUPED,
    SIZES,
    VOCAB,
    WINDOW,
)

THREE: dict[str, Any] = {**GROUPED, "num_hidden_layers": 3}
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
GEMMA4: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 4,
    "layer_types": 2 * ALTERNATING[:2],
    "sliding_window": WINDOW,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 30.0,
}
GEMMA4_MOE: dict[str, Any] = {
    **GROUPED,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "layer_types": ALTERNATING[:2],
    "sliding_window": WINDOW,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
GEMMA4_IDS: dict[str, Any] = {"image_token_id": 286, "video_token_id": 287}
"""Tokens whose embeddings the multimodal model replaces, which no text of the tests contains."""
GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL: dict[str, Any] = {**SIGLIP, "model_type": "pixtral", "head_dim": 16}
IMAGE: dict[str, Any] = {
    "mm_tokens_per_image": 4,
    "image_token_index": 5,
    "boi_token_index": 6,
    "eoi_token_index": 7,
}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 64,
    "out_hidden_size": 64,
    "intermediate_size": 32,
    "num_heads": 2,
    "mlp_ratio": 1,
}
QWEN3_VISION: dict[str, Any] = {**QWEN_VISION, "hidden_size": 32, "deepstack_visual_indexes": [0]}
QWEN_IDS: dict[str, Any] = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
LLAMA4_VISION: dict[str, Any] = {
    **SIGLIP,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
TRANSPOSED_EXPERTS = ("qwen3_vl_moe",)
"""Released with the matrices of experts transposed."""
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "glm": lambda: GlmConfig(**GROUPED, head_dim=16),
    "glm4": lambda: Glm4Config(**GROUPED, head_dim=16),
    "gemma4": lambda: Gemma4TextConfig(**GEMMA4),
    "gemma4_moe": lambda: Gemma4TextConfig(**GEMMA4_MOE),
    "olmo": lambda: OlmoConfig(**GROUPED, clip_qkv=4.0),
    "olmo2": lambda: Olmo2Config(**GROUPED),
    "olmo3": lambda: Olmo3Config(**THREE, sliding_window=WINDOW, layer_types=ALTERNATING),
    "olmoe": lambda: OlmoeConfig(**GROUPED, **EXPERTS),
    "granite": lambda: GraniteConfig(
        **GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=0.7,
    ),
    "granitemoe": lambda: GraniteMoeConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.5
    ),
    "falcon_7b": lambda: FalconConfig(**SIZES, multi_query=True, parallel_attn=True, bias=False),
    "falcon_40b": lambda: FalconConfig(
        **SIZES, new_decoder_architecture=True, num_kv_heads=2, bias=False
    ),
    "falcon_per_head": lambda: FalconConfig(
        **SIZES, multi_query=False, parallel_attn=False, bias=True
    ),
    "stablelm": lambda: StableLmConfig(**GROUPED, use_qkv_bias=True),
    "stablelm_parallel": lambda: StableLmConfig(
        **GROUPED, qk_layernorm=True, use_parallel_residual=True
    ),
    "cohere": lambda: CohereConfig(**GROUPED, use_qk_norm=True, logit_scale=0.5),
    "cohere2": lambda: Cohere2Config(
        **THREE, sliding_window=WINDOW, layer_types=ALTERNATING, logit_scale=0.5
    ),
    "seed_oss": lambda: SeedOssConfig(**GROUPED, head_dim=16, attention_out_bias=True),
    "smollm3": lambda: SmolLM3Config(**THREE, no_rope_layers=[1, 0, 1]),
    "phi": lambda: PhiConfig(**GROUPED),
    "nemotron": lambda: NemotronConfig(**GROUPED, head_dim=16),
    "deepseek_v2": lambda: DeepseekV2Config(**LATENT),
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT),
    "starcoder2": lambda: Starcoder2Config(**GROUPED),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **GROUPED, **EXPERTS, moe_intermediate_size=32, shared_expert_intermediate_size=48
    ),
}
MULTIMODAL: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "gemma3_image_text": lambda: Gemma3Config(text_config=GEMMA, vision_config=SIGLIP, **IMAGE),
    "gemma4_image_text": lambda: Gemma4Config(
        text_config=GEMMA4, vision_config=GEMMA4_VISION, **GEMMA4_IDS
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={**GROUPED, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
        vision_config=PIXTRAL,
        image_token_index=5,
    ),
    "ministral3": lambda: Mistral3Config(
        text_config={**GROUPED, "model_type": "ministral3", "head_dim": 16},
        vision_config=PIXTRAL,
        image_token_index=5,
    ),
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config={**GROUPED, "rope_parameters": MROPE}, vision_config=QWEN_VISION, **QWEN_IDS
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={**GROUPED, "rope_parameters": MROPE}, vision_config=QWEN_VISION, **QWEN_IDS
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={**GROUPED, "head_dim": 16, "rope_parameters": MROPE},
        vision_config=QWEN3_VISION,
        **QWEN_IDS,
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
        text_config={
            **GROUPED,
            **EXPERTS,
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "rope_parameters": MROPE,
        },
        vision_config=QWEN3_VISION,
        **QWEN_IDS,
    ),
    "llama4": lambda: Llama4Config(
        text_config={
            **GROUPED,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
        },
        vision_config=LLAMA4_VISION,
        image_token_index=5,
    ),
}
