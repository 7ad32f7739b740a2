"""Random work against an engine with a tiny pool, every answer compared with one made alone, cold, without a cache.

`python tests/engine_fuzz.py --seconds 600 --seed 1` runs it on its own; the suite runs a short, fixed piece of it.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from tiny_model import VOCAB, make_tiny_model

from engine import LLM, CacheMode, EngineRequest, FinishReason, RequestOutput, SamplingParams, Segment, SegmentKind
from engine.sampler import sample
from engine.step import ScheduledRequest

LOGPROB_TOLERANCE = 2e-3
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"n": 1000}, "n "),
    ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"min_tokens": 99}, "min_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ("",)}, "stop"),
]


@dataclass
class Outcome:
    """What a run saw."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Fuzz:
    """One reference engine, and worlds of random settings against it."""

    def __init__(self, model: Path, seed: int) -> None:
        self.model = str(model)
        self.rng = random.Random(seed)
        self.reference = LLM(self.model, dtype="float32", enable_prefix_caching=False, kv_cache_tokens=4096)
        self.outcome = Outcome()
        self.serial = 0

    def world(self, num_steps: int = 120) -> None:
        """A fresh engine with random settings, random work for some steps, then all that is left."""
        rng = self.rng
        settings: dict[str, Any] = {
            "kv_cache_tokens": rng.choice([96, 160, 256, 1024]),
            "max_num_batched_tokens": rng.choice([1, 2, 5, 16, 64, 256]),
            "max_num_seqs": rng.choice([1, 2, 5, 16]),
            "enable_prefix_caching": rng.random() < 0.85,
            "pinned_tokens": rng.choice([0, 64, 512]),
        }
        is_crowded = rng.random() < 0.5
        if is_crowded:
            settings |= {"kv_cache_tokens": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16}
        core = LLM(self.model, dtype="float32", **settings).core
        library = [self.tokens(rng.randint(1, 50)) for _ in range(6)]
        sent: dict[str, EngineRequest] = {}
        outputs: dict[tuple[str, int], list[RequestOutput]] = {}

        def take(out: list[RequestOutput]) -> None:
            for o in out:
                outputs.setdefault((o.request_id, o.index), []).append(o)

        for _ in range(num_steps):
            if rng.random() < (0.6 if not is_crowded else 0.9 if len(core.scheduler.requests()) < 12 else 0.1):
                request = self.request(library)
                if is_crowded and rng.random() < 0.7:
                    long = {"max_tokens": 60, "stop": (), "stop_token_ids": (), "ignore_eos": True, "n": 1}
                    request = msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, **long))
                refusal = refused(core, request)
                if refusal is None:
                    sent[request.request_id] = request
                else:
                    assert "KV blocks" in refusal or "max_model_len" in refusal, refusal
                    self.outcome.counts["refused"] += 1
            if rng.random() < 0.03:
                self.hostile(core, library)
            if sent and rng.random() < 0.05:
                take(core.abort(rng.choice(list(sent))))
            if core.has_work:
                take(core.step())
            if rng.random() < 0.1:
                core.scheduler.check_integrity()
        self.drain(core, take)
        self.outcome.counts["preemptions"] += core.stats().num_preemptions
        self.outcome.counts["cached tokens"] += core.stats().prefix_tokens
        for (request_id, _), outs in outputs.items():
            self.verify(sent[request_id], outs, settings)
        assert {i for i, _ in outputs} == set(sent), "a request never ended"

    def drain(self, core: Any, take: Any) -> None:
        """Run to the end; a step that does nothing, or a run without end, is a hang."""
        left = 40_000
        while core.has_work:
            scheduled = core.scheduler.schedule()
            assert scheduled.requests, "a step did nothing although there is work"
            take(core._outputs.process(core.scheduler.update(scheduled, core._execute(scheduled))))
            left -= 1
            assert left, "it never ends"
        core.scheduler.check_integrity()
        counts = core.cache.counts()
        assert counts.free + counts.evictable == counts.total, f"blocks leaked: {counts}"
        assert not core._outputs._streams, "a text stream leaked"
        assert not core.cache._announced, "an announcement leaked"
        self.outcome.counts["worlds"] += 1

    def hostile(self, core: Any, library: list[tuple[int, ...]]) -> None:
        """What must be refused by name, and change nothing."""
        params, name = self.rng.choice(HOSTILE)
        request = msgspec.structs.replace(self.request(library), params=SamplingParams(**params))
        bad_prompt = (Segment((VOCAB + 5,)),)
        for bad, word in (
            (request, name),
            (msgspec.structs.replace(request, segments=bad_prompt, params=SamplingParams()), "vocabulary"),
            (msgspec.structs.replace(request, segments=(), params=SamplingParams()), "empty"),
        ):
            refusal = refused(core, bad)
            assert refusal is not None, f"{word} was not refused"
            assert word in refusal, refusal
            self.outcome.counts["hostile"] += 1

    def tokens(self, n: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(256) for _ in range(n))

    def request(self, library: list[tuple[int, ...]]) -> EngineRequest:
        """Segments that others share, with random parameters."""
        rng = self.rng
        segments, scope = [], rng.choice(["shared", "shared", "a", "b"])
        for i in range(rng.randint(1, 4)):
            tokens = rng.choice(library) if rng.random() < 0.8 else self.tokens(rng.randint(1, 40))
            kind = SegmentKind.SYSTEM if i == 0 and rng.random() < 0.5 else SegmentKind.PASSAGE
            segments.append(Segment(tokens, kind, scope if i else rng.choice(["shared", scope])))
            scope = scope if segments[-1].scope == "shared" else segments[-1].scope
        self.serial += 1
        cache = rng.choice([CacheMode.AUTO, CacheMode.EXACT, CacheMode.OFF])
        return EngineRequest(f"r{self.serial}", tuple(segments), self.params(), rng.choice([0, 0, 0, -2, 5]), cache)

    def params(self) -> SamplingParams:
        rng = self.rng
        extra: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 20, 60]), "temperature": 0.0}
        if rng.random() < 0.5:
            extra |= {"temperature": rng.choice([0.5, 1.0, 2.0]), "seed": rng.getrandbits(40)}
            extra |= {
                "top_p": rng.choice([1.0, 0.9, 0.3]),
                "top_k": rng.choice([0, 1, 20]),
                "min_p": rng.choice([0, 0.1]),
            }
        if rng.random() < 0.3:
            extra |= {"repetition_penalty": rng.choice([1.0, 1.3]), "presence_penalty": rng.choice([0.0, 1.5])}
            extra |= {"frequency_penalty": rng.choice([0.0, -1.0, 0.7])}
        if rng.random() < 0.2:
            extra["logit_bias"] = {rng.randrange(VOCAB): rng.choice([-100.0, 3.0]) for _ in range(3)}
        if rng.random() < 0.2:
            extra["stop"] = tuple(rng.choice(["a", "\n", "e", "\x00"]) for _ in range(2))
        if rng.random() < 0.2:
            extra["stop_token_ids"] = tuple(rng.randrange(VOCAB) for _ in range(20))
        if rng.random() < 0.2:
            extra["min_tokens"] = rng.randint(0, extra["max_tokens"])
        if rng.random() < 0.2:
            extra["n"] = rng.randint(2, 4)
        if rng.random() < 0.2:
            extra["logprobs"] = rng.randint(0, 3)
        if rng.random() < 0.1:
            extra["prompt_logprobs"] = rng.randint(0, 3)
        return SamplingParams(ignore_eos=rng.random() < 0.5, **extra)

    def verify(self, request: EngineRequest, outs: list[RequestOutput], settings: dict[str, Any]) -> None:
        """A continuation's tokens, text, reason and log-probabilities against the reference's."""
        last = outs[-1]
        assert last.finish_reason is not None, "no end"
        assert all(o.finish_reason is None for o in outs[:-1]), "an output after the end"
        assert last.finish_reason is not FinishReason.ERROR, last.error
        if request.cache is CacheMode.OFF:
            assert last.stats is not None
            assert last.stats.counts.cached == 0, "a request with the cache off was given cached tokens"
        index = last.index
        expected = self.reference.generate(request.segments, request.params)[index]
        self.outcome.counts["answers"] += 1
        got = [t for o in outs for t in o.token_ids]
        text = "".join(o.text for o in outs)
        at = next((i for i, (a, b) in enumerate(zip(got, expected.token_ids, strict=False)) if a != b), len(got))
        if at < len(got):
            if self.is_close_call(request, expected.token_ids[:at], index, got[at]):
                self.outcome.counts["close calls"] += 1
            else:
                self.outcome.wrong.append(f"{request} {settings}: {got} is not {expected.token_ids}")
            return
        if last.finish_reason is FinishReason.ABORT:
            self.outcome.counts["aborted"] += 1
            assert expected.text.startswith(text)
            return
        same = (got, text, last.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
        pairs = [*zip((x for o in outs for x in o.logprobs), expected.logprobs, strict=True)]
        pairs += zip((x for o in outs for x in o.prompt_logprobs), expected.prompt_logprobs, strict=True)
        near = all(abs(a.logprob - b.logprob) < LOGPROB_TOLERANCE and a.token_id == b.token_id for a, b in pairs)
        if not same or not near:
            self.outcome.wrong.append(f"{request} {settings}: {text!r} is not {expected.text!r}, or its logprobs")

    def is_close_call(self, request: EngineRequest, before: list[int], index: int, got: int) -> bool:
        """Whether logits that differ by rounding only would give the other token."""
        prompt = [t for s in request.segments for t in s.token_ids]
        core = self.reference.core
        probe = EngineRequest("probe", (Segment(tuple(prompt + before)),), SamplingParams(max_tokens=1))
        (r,) = core.scheduler.add(probe)
        while True:
            out = core.scheduler.schedule()
            (item,) = out.requests
            if item.needs_token:
                break
            core._execute(out)
            core.scheduler.update(out, {})
        row = core.runner.logits(out, [(item, len(item.token_ids) - 1)])
        core.scheduler.abort("probe")
        params = request.params
        banned = set(params.stop_token_ids) | (set() if params.ignore_eos else core.scheduler._eos)
        ids = {
            "prompt_ids": torch.tensor(sorted(set(prompt))).numpy(),
            "output_ids": torch.tensor(before, dtype=torch.int64).numpy(),
            "banned_ids": tuple(banned) if len(before) < params.min_tokens else (),
        }
        generator = torch.Generator().manual_seed(0)
        for _ in range(40):
            noise = torch.randn(row.shape, generator=generator) * 2e-5
            like: dict[str, Any] = {f: getattr(item, f) for f in ScheduledRequest.__struct_fields__}
            like |= {"params": params, "seed": params.seed or 0, "output_index": len(before), "stream": index, **ids}
            if sample(row + noise, [ScheduledRequest(**like)])[r.key].token_id == got:
                return True
        return False


def refused(core: Any, request: EngineRequest) -> str | None:
    """Why the engine refuses a request; None if it takes it."""
    try:
        core.add(request)
    except ValueError as e:
        return str(e)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # two threads would only wait for each other at this size
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(make_tiny_model(Path(folder) / "tiny"), args.seed)
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            fuzz.world()
            if fuzz.outcome.wrong:
                break
    print(dict(fuzz.outcome.counts))
    for line in fuzz.outcome.wrong:
        print("WRONG", line)
    sys.exit(bool(fuzz.outcome.wrong))


if __name__ == "__main__":
    main()
