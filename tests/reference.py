"""transformers on the same weights: the second, independent implementation that ours is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint import ModelConfig, iter_weights


def reference_model(path: Path, config: ModelConfig) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    hf = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_q_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    model = LlamaForCausalLM(hf).eval()
    missing, unexpected = model.load_state_dict(dict(iter_weights(path, config)), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model
