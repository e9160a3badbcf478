"""Configurations of transformers made small: two layers of width 64, for a model that is built in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCABULARY, POSITIONS = 256, 128

_VALUES: Mapping[int, str] = {
    64: "hidden_size d_model n_embd dim emb_dim embedding_size model_dim attention_hidden_size d_embed conv_dim "
    "embedding_dim true_hidden_size lru_width rnn_hidden_size hidden_size_per_layer_input dim_model",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads decoder_num_layers num_blocks num_experts_per_tok moe_topk topk top_k "
    "num_experts_per_token n_groups num_encoder_blocks",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts mamba_n_heads num_attention_heads_per_layer",
    16: "head_dim d_kv d_head attention_head_dim kv_lora_rank qk_nope_head_dim v_head_dim mamba_d_state state_size "
    "linear_key_head_dim linear_value_head_dim global_head_dim mamba_d_head ssm_state_size index_head_dim",
    8: "qk_rope_head_dim rotary_dim",
    32: "q_lora_rank moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size mamba_head_dim",
    128: "intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim n_inner hidden_dim ffn_hidden_size d_inner "
    "inner_dim shared_intermediate_size intermediate_size_mlp",
    VOCABULARY: "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size text_vocab_size "
    "vocab_size_per_layer_input",
    POSITIONS: "n_positions n_ctx max_seq_len max_sequence_length max_seq_length",
    POSITIONS + 2: "max_position_embeddings",  # RoBERTa and its relatives number positions from 2.
}

SMALL: Mapping[str, int] = {name: value for value, names in _VALUES.items() for name in names.split()}
"""Field of a configuration -> its small value."""

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "led": {"attention_window": 8},
    "longformer": {"attention_window": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "mpt": {"attn_config": {"attn_impl": "torch"}},
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds": False, "is_decoder": False},
    "xlm-roberta-xl": {"pad_token_id": 1},
    "zamba": {"num_hidden_layers": 3, "attn_layer_period": 3},
}
"""Model type -> values of fields that no rule for all models gives."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id", "forced_bos_token_id")


def small_values(default: Mapping[str, Any], model_type: str = "") -> dict[str, Any]:
    """The fields of a default configuration that a small one must set, with their values.

    Ids of special tokens that would lie outside the small vocabulary become 3, or 0 for padding.
    """
    values: dict[str, Any] = {name: SMALL[name] for name in default if name in SMALL and _is_number(default[name])}
    outside = [name for name in default if name.endswith("token_id") and _is_outside(default[name])]
    values |= {name: 0 if name == "pad_token_id" else 3 for name in outside}
    return values | dict(SPECIAL.get(model_type, {}))


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_outside(value: object) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return any(isinstance(number, int) and number >= VOCABULARY for number in numbers)


def small_config(config_class: Any, model_type: str = "") -> Any:
    """A small configuration of this class; nested configurations are made small too. Raises: any error of the class."""
    default = config_class()
    values = small_values(default.to_dict(), model_type)
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        nested = getattr(default, name, None)
        if nested is not None and hasattr(part, "model_type"):
            values[name] = small_config(type(nested)).to_dict()
    return config_class(**values)
