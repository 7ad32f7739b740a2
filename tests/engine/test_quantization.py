"""Ways to keep weights: blocks as in the file are the file's numbers, products with blocks lose little, what cannot be
had is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import make_tiny_model

from engine import LLM, SamplingParams
from engine.runner import weight_plan
from kernels import cpu
from kernels.weights import BlockWeight, DenseWeight

pytestmark = pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler")
PROMPT = [1 + 7 * i % 250 for i in range(60)]


def logprobs(path: Path, quantization: str, prompt: list[int]) -> torch.Tensor:
    llm = LLM(str(path), dtype="float32", quantization=quantization, max_model_len=256)
    (done,) = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    return torch.tensor([x.logprob for x in done.prompt_logprobs])


def test_blocks_kept_as_in_the_file_are_the_dense_weights(model_path: Path) -> None:
    """The same numbers; what differs is that their products round activations to eight bits."""
    ways = (LLM(str(model_path), dtype="float32", quantization=q, max_model_len=256) for q in ("auto", "none"))
    kept, dense = (llm.core.runner._model for llm in ways)
    for mine, theirs in ((kept._layers[3].down, dense._layers[3].down), (kept._head, dense._head)):
        assert isinstance(mine, BlockWeight)
        assert isinstance(theirs, DenseWeight)
        torch.testing.assert_close(mine.dequantize(), theirs.value, rtol=1e-6, atol=1e-7)
    llm = LLM(str(model_path), max_model_len=256)
    assert llm.core.info().weights.startswith("as in the file")
    assert llm.core.runner._model.num_weight_bytes < 100e6


@pytest.mark.parametrize(("quantization", "mean_change"), [("auto", 0.1), ("int8", 0.15), ("int4", 0.1)])
def test_blocks_change_little(model_path: Path, quantization: str, mean_change: float) -> None:
    changed, dense = (logprobs(model_path, q, PROMPT) for q in (quantization, "none"))
    assert (changed - dense).abs().mean() < mean_change


def test_any_checkpoint_can_be_quantized(tmp_path: Path) -> None:
    llm = LLM(str(make_tiny_model(tmp_path / "tiny")), dtype="float32", quantization="int8", max_model_len=256)
    assert llm.core.info().weights.startswith("int8")
    assert isinstance(llm.core.runner._model._head, BlockWeight)
    (done,) = llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))
    assert done.error is None


def test_without_a_compiler_auto_is_dense_and_int8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise cpu.NoKernels("no C++ compiler (g++) was found")

    monkeypatch.setattr("engine.runner.load_kernels", none)
    keep, kind, how = weight_plan("auto", torch.device("cpu"))
    assert (keep, kind) == (frozenset(), None)
    assert "no C++ compiler" in how
    with pytest.raises(ValueError, match="quantization int8 is not possible: no C"):
        weight_plan("int8", torch.device("cpu"))
    with pytest.raises(ValueError, match="no CPU"):
        weight_plan("int4", torch.device("cuda"))
