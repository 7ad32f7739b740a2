"""A cross-encoder orders what was found; its numbers are checked against transformers' own model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from retrieval import IngestRequest, Retriever, SearchRequest, SourceFile

TEXTS = {
    "apple": "Apples are stored in the cool cellar over the winter.",
    "pear": "Pears are stored on straw and eaten by December.",
    "cellar": "The cellar has two doors and no window.",
    "winter": "In winter the road to the farm is closed for weeks.",
}
QUESTION = "Where are apples stored in winter?"


def make_cross_encoder(folder: Path, labels: int = 1) -> Path:
    """One layer of random weights, over letters."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *"abcdefghijklmnopqrstuvwxyz?.",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    core = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=256, **names).save_pretrained(folder)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=256, num_labels=labels, initializer_range=0.6,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cross_encoder(tmp_path_factory.mktemp("cross"))


@pytest.fixture(scope="module")
def retriever(
    tmp_path_factory: pytest.TempPathFactory, embedder_path: Path, cross_encoder: Path
) -> Iterator[Retriever]:
    with Retriever(tmp_path_factory.mktemp("data"), embedder_path, 1, reranker=cross_encoder) as r:
        r.ingest(IngestRequest(tuple(SourceFile(f"{k}.txt", t.encode(), k) for k, t in TEXTS.items())))
        yield r


def expected_scores(folder: Path) -> dict[str, float]:
    """The model's own answer, by transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    out = {}
    for name, text in TEXTS.items():
        encoded = tokenizer(QUESTION, f"{name}\n{text}", return_tensors="pt")
        with torch.inference_mode():
            out[name] = float(torch.sigmoid(model(**encoded).logits[0, 0]))
    return out


def test_hits_come_in_the_rerankers_order_with_its_scores(retriever: Retriever, cross_encoder: Path) -> None:
    wanted = expected_scores(cross_encoder)
    order = sorted(wanted, key=lambda name: -wanted[name])
    result = retriever.search(SearchRequest(QUESTION, top_k=4))
    plain = retriever.search(SearchRequest(QUESTION, top_k=4, rerank=False))
    assert [h.document_id for h in result.hits] == order
    assert order != [h.document_id for h in plain.hits]
    assert [h.scores.rerank for h in result.hits] == pytest.approx([wanted[name] for name in order], abs=1e-4)
    assert all(h.scores.rerank is None for h in plain.hits)
    assert result.rerank_ms > 0
    assert {h.document_id: h.score for h in result.hits} == {h.document_id: h.score for h in plain.hits}


def test_the_reranker_chooses_among_more_than_is_returned(retriever: Retriever, cross_encoder: Path) -> None:
    wanted = expected_scores(cross_encoder)
    (hit,) = retriever.search(SearchRequest(QUESTION, top_k=1, rerank=True)).hits
    assert hit.document_id == max(wanted, key=lambda name: wanted[name])


def test_a_least_rerank_score_leaves_out_what_is_below(retriever: Retriever, cross_encoder: Path) -> None:
    wanted = expected_scores(cross_encoder)
    least = sorted(wanted.values())[2]
    found = retriever.search(SearchRequest(QUESTION, top_k=4, min_score={"rerank": least - 1e-6})).hits
    assert {h.document_id for h in found} == {name for name, score in wanted.items() if score >= least}


def test_diversity_weighs_the_rerankers_scores(retriever: Retriever, cross_encoder: Path) -> None:
    wanted = expected_scores(cross_encoder)
    found = retriever.search(SearchRequest(QUESTION, top_k=4, diversity=0.01)).hits
    assert found[0].document_id == max(wanted, key=lambda name: wanted[name])
    assert len(found) == 4


def test_nothing_found_is_nothing_to_rerank(retriever: Retriever) -> None:
    assert retriever.search(SearchRequest(QUESTION, collection="empty")).hits == ()


@pytest.mark.parametrize(
    "request_", [SearchRequest(QUESTION, rerank=True), SearchRequest(QUESTION, min_score={"rerank": 0.5})]
)
def test_without_a_reranker_asking_for_one_is_refused(
    tmp_path: Path, embedder_path: Path, request_: SearchRequest
) -> None:
    with Retriever(tmp_path, embedder_path, 1) as r, pytest.raises(ValueError, match="rerank"):
        r.search(request_)


def test_a_folder_that_holds_no_reranker_is_refused_by_name(tmp_path: Path, embedder_path: Path) -> None:
    two = make_cross_encoder(tmp_path / "two", labels=2)
    with pytest.raises(ValueError, match="two gives 2 numbers"):
        Retriever(tmp_path / "data", embedder_path, 1, reranker=two)
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text(json.dumps([1]))
    for name in ("list", "nothing"):
        with pytest.raises(ValueError, match=f"{name} is not a cross-encoder"):
            Retriever(tmp_path / "data", embedder_path, 1, reranker=tmp_path / name)
