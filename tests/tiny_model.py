"""A whole Llama checkpoint of 0.1 MB with a byte tokenizer: real files, real decoder, random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INTERMEDIATE, LAYERS, Q_HEADS, KV_HEADS = 32, 64, 2, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 256 + len(SPECIAL)
EOS = VOCAB - 1
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, max_model_len: int = 512) -> Path:
    """Write the checkpoint; weights are wide enough that the best token is seldom a close call."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int, std: float = 0.25) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    head_dim = HIDDEN // Q_HEADS
    weights = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN, std=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(VOCAB, HIDDEN, std=0.6),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        weights |= {
            f"{at}input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}self_attn.q_proj.weight": weight(Q_HEADS * head_dim, HIDDEN),
            f"{at}self_attn.k_proj.weight": weight(KV_HEADS * head_dim, HIDDEN),
            f"{at}self_attn.v_proj.weight": weight(KV_HEADS * head_dim, HIDDEN),
            f"{at}self_attn.o_proj.weight": weight(HIDDEN, Q_HEADS * head_dim),
            f"{at}mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{at}mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{at}mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        }
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return folder
