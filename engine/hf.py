"""Reads Hugging Face model folders: config.json and safetensors, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint import FIXED_ROTARY, CheckpointError, ModelConfig, RopeScaling

if TYPE_CHECKING:
    import torch

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def read_config(folder: Path) -> ModelConfig:
    """Architecture from config.json and generation_config.json. Raises `CheckpointError`."""
    raw = read_json(folder / "config.json")
    names = raw.get("architectures") or [raw.get("model_type")]
    if names[0] not in SUPPORTED:
        raise CheckpointError(
            f"{folder}: architecture {names[0]!r} is not supported (supported: {', '.join(SUPPORTED)})"
        )
    _refuse_unsupported(folder, raw)
    try:
        return _make_config(folder, raw, names[0])
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{folder / 'config.json'}: a setting is missing or of the wrong type: {e}") from e


def _make_config(folder: Path, raw: dict[str, Any], architecture: str) -> ModelConfig:
    heads = int(raw["num_attention_heads"])
    rope = raw.get("rope_parameters") or {}
    return ModelConfig(
        architecture=architecture,
        hidden_size=int(raw["hidden_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_q_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(folder, raw.get("rope_scaling") or rope),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", architecture == "Qwen2ForCausalLM")),
        eos_token_ids=read_eos_ids(folder, raw),
    )


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the folder's safetensors files, in the type they are stored in. Raises `CheckpointError`."""
    from safetensors import SafetensorError, safe_open

    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    yield name, shard.get_tensor(name)
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{file} is damaged or cannot be read: {e}") from e


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `CheckpointError`."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"cannot read {file}: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return value


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    names = sorted(set(read_json(index).get("weight_map", {}).values()))
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names a file outside its folder")
    return [folder / name for name in names]


def _refuse_unsupported(folder: Path, raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{folder}: activation {raw['hidden_act']!r} is not supported (supported: silu)")
    uses_window = raw.get("sliding_window") and raw.get("use_sliding_window", True)
    if uses_window and raw["sliding_window"] < raw.get("max_position_embeddings", 0):
        raise CheckpointError(f"{folder}: sliding-window attention is not supported")
    if raw.get("mlp_bias"):
        raise CheckpointError(f"{folder}: mlp_bias is not supported")


def _rope_scaling(folder: Path, raw: dict[str, Any]) -> RopeScaling | None:
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return None
    if kind not in FIXED_ROTARY:
        known = ", ".join(FIXED_ROTARY)
        raise CheckpointError(f"{folder}: rotary scaling {kind!r} is not supported (supported: {known})")
    return RopeScaling(
        kind=kind,
        factor=float(raw["factor"]),
        low_freq_factor=float(raw.get("low_freq_factor", 1.0)),
        high_freq_factor=float(raw.get("high_freq_factor", 4.0)),
        original_max_position=int(raw.get("original_max_position_embeddings", 8192)),
    )


def read_eos_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """End-of-text ids of config.json (`raw`) and generation_config.json together."""
    sources = [raw.get("eos_token_id")]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources.append(read_json(generation).get("eos_token_id"))
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list) else [] if source is None else [source])
    return tuple(sorted(ids))
