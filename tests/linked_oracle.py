"""The tiny model in float64, written for reading: exact prompts, and prompts with passages borrowed from elsewhere.

Keys are kept as they are before they are turned, and turned for the place where they are used: borrowing needs no delta
here, which makes this independent of how the engine does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.api import BLOCK_SIZE, SHARED_SCOPE
from engine.checkpoint import iter_weights, load_config


class Borrowed(NamedTuple):
    """Positions first..last-1 come from the passage that begins at `passage`, computed behind `num_system` tokens."""

    first: int
    last: int
    passage: int
    num_system: int


Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Unturned keys and values [positions, heads, head_dim] of each layer."""


class Oracle:
    """Logits and KV of token sequences."""

    def __init__(self, path: Path) -> None:
        self.config = load_config(path)
        self.weights = {name: w.double() for name, w in iter_weights(path, self.config)}
        self.inv_freq = torch.from_numpy(self.config.inv_freq())

    def logits(self, tokens: Sequence[int], borrowed: Sequence[Borrowed] = ()) -> torch.Tensor:
        """[len(tokens), vocab]; NaN at borrowed positions."""
        c = self.config
        kv: Layers = [(torch.zeros(len(tokens), c.num_kv_heads, c.head_dim).double(),) * 2 for _ in range(c.num_layers)]
        kv = [(k.clone(), v.clone()) for k, v in kv]
        is_new = torch.ones(len(tokens), dtype=torch.bool)
        for b in borrowed:
            source = self.kv([*tokens[: b.num_system], *tokens[b.passage : b.last]])
            at = b.num_system + b.first - b.passage
            is_new[b.first : b.last] = False
            for mine, theirs in zip(kv, source, strict=True):
                for a, x in zip(mine, theirs, strict=True):
                    a[b.first : b.last] = x[at:]
        positions = torch.arange(len(tokens))[is_new]
        hidden = self._forward(torch.tensor(tokens)[is_new], positions, kv)
        out = torch.full((len(tokens), c.vocab_size), torch.nan).double()
        head = self.weights["lm_head.weight"]
        out[positions] = _norm(hidden, self.weights["model.norm.weight"], c.rms_norm_eps) @ head.T
        return out

    def kv(self, tokens: Sequence[int]) -> Layers:
        """KV of an exact prompt, keys unturned."""
        c = self.config
        shape = (len(tokens), c.num_kv_heads, c.head_dim)
        kv = [(torch.zeros(shape).double(), torch.zeros(shape).double()) for _ in range(c.num_layers)]
        self._forward(torch.tensor(list(tokens)), torch.arange(len(tokens)), kv)
        return kv

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of [positions, heads, head_dim]."""
        angles = (positions[:, None] * self.inv_freq)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, kv: Layers) -> torch.Tensor:
        """Hidden states of tokens at these positions; their KV is put beside what `kv` holds already."""
        c, w = self.config, self.weights
        x = w["model.embed_tokens.weight"][tokens]
        every = torch.arange(len(kv[0][0]))
        for i, (k_all, v_all) in enumerate(kv):
            at = f"model.layers.{i}."
            h = _norm(x, w[f"{at}input_layernorm.weight"], c.rms_norm_eps)
            q, k, v = (
                (h @ w[f"{at}self_attn.{p}_proj.weight"].T).view(len(h), -1, c.head_dim) for p in ("q", "k", "v")
            )
            k_all[positions], v_all[positions] = k, v
            group = c.num_q_heads // c.num_kv_heads
            keys = self.turn(k_all, every).repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", self.turn(q, positions), keys) * c.head_dim**-0.5
            scores = scores.masked_fill(every > positions[:, None], -torch.inf)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_all.repeat_interleave(group, 1))
            x = x + mixed.flatten(1) @ w[f"{at}self_attn.o_proj.weight"].T
            h = _norm(x, w[f"{at}post_attention_layernorm.weight"], c.rms_norm_eps)
            gate, up = (h @ w[f"{at}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T
        return x


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def borrowed_of(request: Any) -> list[Borrowed]:
    """What a running request of the scheduler borrows."""
    layout, allocation = request.layout, request.allocation
    return [
        Borrowed(
            layout.starts[link.first_block],
            layout.ends[link.passage.last_block - 1],
            layout.starts[link.passage.first_block],
            layout.num_system_tokens,
        )
        for link in allocation.links
    ]


def assert_tree_is_exact(core: Any, oracle: Oracle, atol: float = 1e-4) -> int:
    """Every block in the tree holds the KV of its path's tokens, computed exactly; returns how many there are."""
    tree, pool = core.cache._tree, core.runner._pool
    scopes = {i: name for name, i in core.cache._scope_ids.items()}
    num = 0

    def walk(node: Any, tokens: list[int], slots: list[int], scope: str) -> None:
        nonlocal num
        for key, block in zip(node.keys, node.blocks, strict=True):
            own = np.frombuffer(key[4:], np.int32).tolist()
            at = scopes[int.from_bytes(key[:4], "little")]
            assert scope in (SHARED_SCOPE, at), "a scope widens along a path"
            scope = at
            tokens, slots = tokens + own, [*slots, *(block * BLOCK_SIZE + i for i in range(len(own)))]
            num += 1
        if not node.children and tokens:
            _compare(oracle, pool, tokens, slots, atol)
        for child in node.children.values():
            walk(child, tokens, slots, scope)

    walk(tree.root, [], [], SHARED_SCOPE)
    return num


def _compare(oracle: Oracle, pool: Any, tokens: list[int], slots: list[int], atol: float) -> None:
    for i, (k, v) in enumerate(oracle.kv(tokens)):
        got_k, got_v = (x[i].flatten(0, 1)[slots].double() for x in (pool.k, pool.v))
        assert torch.allclose(got_k, oracle.turn(k, torch.arange(len(tokens))), atol=atol), "a cached key is wrong"
        assert torch.allclose(got_v, v, atol=atol), "a cached value is wrong"
