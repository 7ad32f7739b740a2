"""Documents in, hits out: parsing, passages, search, deletion, crash, worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.api import IngestRequest, JobState, SearchMode, SearchRequest, SourceFile
from retrieval.corpus import EmbedderMismatch, StoreLocked
from retrieval.dense import DenseIndex
from retrieval.embed import Embedder, SentenceTransformerEmbedder
from retrieval.lexical import BM25, best_rows, has_syllables, terms
from retrieval.parse import parse
from retrieval.parsed import ParseError, decode
from retrieval.retriever import Retriever
from retrieval.split import split
from retrieval.store import Store

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def embedder(embedder_path: Path) -> Embedder:
    return SentenceTransformerEmbedder(embedder_path, 2)


@pytest.fixture
def retriever(tmp_path: Path, embedder_path: Path, embedder: Embedder) -> Iterator[Retriever]:
    with Retriever(tmp_path / "data", embedder_path, 2) as r:
        r.embedder = embedder  # one loaded model serves all tests
        yield r


def text_file(name: str, text: str, **extra: Any) -> SourceFile:
    return SourceFile(name, text.encode(), **extra)


def ingest(r: Retriever, *sources: SourceFile, collection: str = "default") -> Any:
    return r.ingest(IngestRequest(sources, collection))


def found(r: Retriever, query: str, **extra: Any) -> list[str]:
    return [h.passage.text for h in r.search(SearchRequest(query, **extra)).hits]


HTML = """<html><head><title>Guide</title><style>p{}</style></head><body><nav>menu</nav><h1>Top</h1><p>First <b>bold</b>
text.</p><h2>Sub</h2><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table><pre>x = 1
y = 2</pre><script>no()</script></body></html>"""


def test_html_keeps_structure_and_drops_noise() -> None:
    p = parse("a.html", HTML.encode())
    assert p.title == "Guide"
    assert p.text == "Top\n\nFirst bold text.\n\nSub\n\na | b\n1 | 2\n\nx = 1\ny = 2"
    assert [p.text[b.start : b.end] for b in p.blocks][1] == "First bold text."
    assert p.blocks[3].heading == "Top > Sub"


def test_a_defined_term_is_the_heading_of_its_definition() -> None:
    source = "<h1>M</h1><dl><dt>f(x)</dt><dd>Does f.<dl><dt>x</dt><dd>An x.</dd></dl></dd><dt>g()</dt><dd>Does g.</dd></dl><p>End.</p>"
    p = parse("a.html", source.encode())
    headings = {p.text[b.start : b.end]: b.heading for b in p.blocks}
    assert headings["Does f."] == "M > f(x)"
    assert headings["An x."] == "M > f(x) > x"
    assert headings["Does g."] == "M > g()"
    assert headings["End."] == "M"


def test_markdown_blocks_are_spans_with_headings() -> None:
    source = "# One\n\nText a.\n\n```py\n# no heading\n\nx\n```\n\n## Two\n| a | b |\n|---|---|\n"
    p = parse("a.md", source.encode())
    assert p.text == source
    blocks = [(p.text[b.start : b.end], b.heading) for b in p.blocks]
    assert blocks[0] == ("# One", "One")
    assert blocks[2] == ("```py\n# no heading\n\nx\n```", "One")
    assert blocks[-1] == ("| a | b |\n|---|---|", "One > Two")


VIETNAMESE = "Tiếng Việt có dấu.\n\nHà Nội là thủ đô."


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings_give_the_same_text(encoding: str) -> None:
    data = VIETNAMESE.encode(encoding)
    if encoding == "utf-16-be":
        data = b"\xfe\xff" + data
    assert decode("a.txt", data) == VIETNAMESE


def test_gb18030_is_recognised_and_unknown_bytes_are_an_error() -> None:
    chinese = "故乡的歌是一支清远的笛，总在有月亮的晚上响起。"
    assert decode("a.txt", chinese.encode("gb18030")) == chinese
    with pytest.raises(ParseError, match=r"a\.txt.*encoding") as e:
        decode("a.txt", b"caf\xe9 \xff\x81 text")
    assert e.value.code == "bad_encoding"


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("x.exe", b"MZ", "unsupported_type"),
        ("noextension", b"text", "unsupported_type"),
        ("empty.txt", b"", "no_text"),
        ("spaces.md", b"  \n\t\n", "no_text"),
        ("bom.txt", b"\xef\xbb\xbf", "no_text"),
        ("empty.html", b"<html><script>x</script></html>", "no_text"),
        ("bad.pdf", b"%PDF-1.7 nonsense", "bad_document"),
    ],
)
def test_bad_sources_are_named(name: str, data: bytes, code: str) -> None:
    with pytest.raises(ParseError, match=name) as e:
        parse(name, data)
    assert e.value.code == code


def image_only_pdf() -> bytes:
    """A PDF of one page with a drawn rectangle and no text."""
    content = b"0 0 1 rg 10 10 80 80 re f"
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 100 100]/Contents 4 0 R>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
    ]
    out, offsets = b"%PDF-1.4\n", []
    for i, o in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj%sendobj\n" % (i, o)
    xref = b"".join(b"%010d 00000 n \n" % o for o in offsets)
    return out + b"xref\n0 5\n0000000000 65535 f \n%strailer<</Size 5/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        xref,
        len(out),
    )


def test_a_pdf_of_images_only_has_no_text() -> None:
    with pytest.raises(ParseError, match=r"scan\.pdf holds no text") as e:
        parse("scan.pdf", image_only_pdf())
    assert e.value.code == "no_text"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab. \nđ中", max_size=120), max_size=8), st.integers(5, 40))
def test_passages_hold_all_text_and_never_pass_the_limit(embedder: Embedder, parts: list[str], limit: int) -> None:
    source = "\n\n".join(parts)
    if not source.strip():
        return
    parsed = parse("a.txt", source.encode())
    spans = split(parsed, embedder.offsets, limit)
    assert all(s.num_tokens <= limit and embedder.count(parsed.text[s.start : s.end]) == s.num_tokens for s in spans)
    assert all(a.end <= b.start for a, b in pairwise(spans))
    kept = "".join("".join(parsed.text[s.start : s.end].split()) for s in spans)
    assert kept == "".join(parsed.text.split())


def test_a_needle_at_the_end_of_a_long_text_is_found(retriever: Retriever) -> None:
    filler = "The committee met again and nothing was decided about the roof. " * 120
    ingest(retriever, text_file("long.txt", filler + "The vault code is zebra nine."))
    assert "zebra nine" in found(retriever, "What is the vault code?")[0]


def test_search_ranks_the_right_text_first_and_scores_are_cosines(retriever: Retriever) -> None:
    ingest(
        retriever,
        text_file("a.txt", "The lighthouse keeper lit the lamp every evening."),
        text_file("b.txt", "Bread needs flour, water, salt and yeast."),
    )
    result = retriever.search(SearchRequest("What goes into bread?"))
    assert result.hits[0].source == "b.txt"
    assert all(0 <= h.score <= 1 for h in result.hits)
    exact = retriever.search(SearchRequest("b\nBread needs flour, water, salt and yeast.")).hits[0]
    assert exact.score > 0.98
    assert len(result.hits) == 2


@pytest.mark.parametrize("query", ["?!", "…", "😀"])
def test_queries_without_words_wrap_around_nothing(retriever: Retriever, query: str) -> None:
    ingest(retriever, text_file("a.txt", "One."), text_file("b.txt", "Two."))
    assert len(found(retriever, query, top_k=50)) <= 2
    assert found(retriever, query, top_k=50, mode=SearchMode.LEXICAL) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"query": "  "}, "query"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 101}, "top_k"),
        ({"collection": "../x"}, "collection"),
        ({"filters": {"a": {"$near": 1}}}, r"filters\.a\.\$near"),
        ({"filters": {"$or": []}}, r"filters\.\$or"),
        ({"min_score": {"cosine": 0.5}}, "min_score: there is no score 'cosine'"),
        ({"min_score": {"dense": float("nan")}}, r"min_score\.dense must be a finite number"),
        ({"diversity": 1.5}, "diversity"),
    ],
)
def test_bad_searches_are_refused_by_name(retriever: Retriever, change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        retriever.search(SearchRequest(**{"query": "x", **change}))


def test_filters_are_exact_and_closed(retriever: Retriever) -> None:
    ingest(
        retriever,
        text_file("a.txt", "Apples are red.", metadata={"lang": "en", "year": 2020}),
        text_file("b.txt", "Apples are green.", metadata={"lang": "en", "year": 2021}),
    )
    assert found(retriever, "apples", filters={"lang": "en", "year": 2021}) == ["Apples are green."]
    assert found(retriever, "apples", filters={"lang": "fr"}) == []
    assert found(retriever, "apples", filters={"missing": None}) == []


def test_operators_work_inside_the_search(retriever: Retriever) -> None:
    """Not on the hits afterwards: the one document that fits is found however many are nearer."""
    many = [text_file(f"{i}.txt", f"Apples are red, number {i}.", metadata={"year": 1900 + i}) for i in range(80)]
    ingest(retriever, *many, text_file("z.txt", "A treatise on ships.", metadata={"year": 2021, "tags": ["sea"]}))
    for mode in SearchMode:
        for spec in ({"year": {"$gte": 2000}}, {"tags": "sea"}, {"$not": {"year": {"$lt": 2000}}}):
            expected = [] if mode is SearchMode.LEXICAL else ["A treatise on ships."]
            assert found(retriever, "red apples", filters=spec, mode=mode, top_k=3) == expected
        assert len(found(retriever, "red apples", filters={"year": {"$in": [1900, 1979]}}, mode=mode)) == 2


def test_a_fault_with_one_source_does_not_lose_the_others(
    retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = retriever.embedder.embed_passages

    def fail(texts: Any) -> Any:
        if any("poison" in t for t in texts):
            raise RuntimeError("the embedder broke")
        return whole(texts)

    monkeypatch.setattr(retriever.embedder, "embed_passages", fail)
    job = ingest(retriever, text_file("a.txt", "Apples."), text_file("b.txt", "poison"), text_file("c.txt", "Ships."))
    assert [d.source for d in job.documents] == ["a.txt", "c.txt"]
    assert [(e.name, e.code, e.message) for e in job.errors] == [
        ("b.txt", "internal_error", "RuntimeError: the embedder broke")
    ]


def test_a_threshold_names_its_score_and_may_leave_nothing(retriever: Retriever) -> None:
    ingest(retriever, text_file("a.txt", "Apples are red."), text_file("b.txt", "Ships sail far."))
    request = SearchRequest("red apples", top_k=2)
    near, far = retriever.search(request).hits
    assert near.scores.dense > far.scores.dense
    between = (near.scores.dense + far.scores.dense) / 2
    assert found(retriever, "red apples", min_score={"dense": between}) == ["Apples are red."]
    assert found(retriever, "red apples", min_score={"lexical": 0.001}) == ["Apples are red."]
    assert found(retriever, "red apples", min_score={"dense": between, "fused": 2.0}) == []
    assert found(retriever, "volcanoes", min_score={"lexical": 0.1}) == []


def test_equal_texts_come_once_and_name_every_document(retriever: Retriever) -> None:
    text = "The bridge was opened in 1932."
    ingest(retriever, *(text_file(f"{n}.txt", text) for n in "abc"), text_file("d.txt", "Ships sail far."))
    hits = retriever.search(SearchRequest("When was the bridge opened?", top_k=5)).hits
    assert [h.passage.text for h in hits].count(text) == 1
    assert sorted([hits[0].title, *(t.title for t in hits[0].also_in)]) == ["a", "b", "c"]
    assert hits[1].also_in == ()
    retriever.delete(hits[0].also_in[0].document_id)
    assert len(retriever.search(SearchRequest("When was the bridge opened?")).hits[0].also_in) == 1


def test_diversity_prefers_what_was_not_said_yet(retriever: Retriever) -> None:
    ingest(
        retriever,
        text_file("a.txt", "The red apple tree bears red apples."),
        text_file("b.txt", "The red apple tree bears many red apples."),
        text_file("c.txt", "Apple sauce is sold in jars."),
    )
    assert "Apple sauce is sold in jars." not in found(retriever, "red apple tree", top_k=2)
    assert "Apple sauce is sold in jars." in found(retriever, "red apple tree", top_k=2, diversity=0.7)


def test_delete_removes_everywhere_at_once_and_after_reopening(tmp_path: Path, embedder_path: Path) -> None:
    with Retriever(tmp_path, embedder_path) as r:
        job = ingest(r, text_file("a.txt", "The secret word is kumquat."), text_file("b.txt", "Another text."))
        assert r.delete(job.documents[0].document_id)
        assert not r.delete(job.documents[0].document_id)
        assert not any("kumquat" in t for t in found(r, "secret word kumquat", top_k=10))
        assert r.document(job.documents[0].document_id) is None
    with Retriever(tmp_path, embedder_path) as r:
        assert found(r, "secret word kumquat", mode=SearchMode.LEXICAL) == []
        assert [d.source for d in r.documents()] == ["b.txt"]


def test_ingesting_again_is_no_change_and_changed_content_replaces(retriever: Retriever) -> None:
    first = ingest(retriever, text_file("a.txt", "Old content about owls.")).documents[0]
    again = ingest(retriever, text_file("a.txt", "Old content about owls.")).documents[0]
    assert again == first
    ingest(retriever, text_file("a.txt", "New content about foxes."))
    assert retriever.stats().num_documents == 1
    assert found(retriever, "owls", mode=SearchMode.LEXICAL) == []
    assert found(retriever, "foxes") == ["New content about foxes."]


def test_equal_passages_of_two_files_come_once(retriever: Retriever) -> None:
    ingest(retriever, text_file("a.txt", "Same words here."), text_file("b.txt", "Same words here."))
    assert found(retriever, "same words", top_k=5) == ["Same words here."]


def test_one_bad_source_does_not_sink_the_others(retriever: Retriever) -> None:
    job = ingest(retriever, SourceFile("x.exe", b"MZ"), text_file("a.txt", "Fine text."))
    assert (job.state, [e.name for e in job.errors], len(job.documents)) == (JobState.DONE, ["x.exe"], 1)
    assert ingest(retriever, SourceFile("x.exe", b"MZ")).state is JobState.FAILED


@pytest.mark.parametrize("name", ["../../etc/x.txt", "/abs/x.txt", "a\\..\\x.txt", "x\0.txt", "y" * 400 + ".txt"])
def test_file_names_are_labels_never_paths(retriever: Retriever, tmp_path: Path, name: str) -> None:
    before = set(tmp_path.rglob("*"))
    job = ingest(retriever, text_file(name, "Harmless text.", media_type="text/plain"))
    assert "/" not in job.documents[0].source
    assert "\0" not in job.documents[0].source
    assert {p.name for p in set(tmp_path.rglob("*")) - before} <= {"foreword.sqlite-wal", "foreword.sqlite-shm"}


@pytest.mark.parametrize("document_id", ["a/b", "../x", "a\0b", "x" * 201])
def test_bad_document_ids_are_refused(retriever: Retriever, document_id: str) -> None:
    job = ingest(retriever, text_file("a.txt", "Text.", document_id=document_id))
    assert [e.code for e in job.errors] == ["invalid_id"]


def test_vietnamese_is_found_with_and_without_marks(retriever: Retriever) -> None:
    ingest(
        retriever,
        text_file("a.txt", "Hà Nội là thủ đô của Việt Nam."),
        text_file("b.txt", "Đà Nẵng là thành phố biển."),
        text_file("c.txt", "Con ma trong nhà, má tôi và mạ non."),
    )
    composed, decomposed = "thủ đô", "thu\u0309 \u0111o\u0302"
    for query in (composed, decomposed, "thu do viet nam"):
        assert found(retriever, query, mode=SearchMode.LEXICAL)[0].startswith("Hà Nội")
    assert found(retriever, "da nang", mode=SearchMode.LEXICAL)[0].startswith("Đà Nẵng")


def test_exact_marks_rank_higher() -> None:
    index = BM25()
    index.add(1, "ma ma")
    index.add(2, "má má")
    assert [k for k, _ in index.search("má", 2)] == [2, 1]


@pytest.mark.parametrize(
    ("query", "key"),
    [("故乡", 0), ("고향", 1), ("บ้าน", 2), ("وطني", 3), ("max_num_seqs", 4), ("numSeqs", 5), ("seqs", 4)],
)
def test_every_script_and_identifiers_are_found(query: str, key: int) -> None:
    index = BM25()
    lines = [
        "低头思故乡",
        "나의 고향은 남쪽",
        "ฉันกลับบ้าน",
        "أحب وطني",
        "set max_num_seqs",
        "the numSeqs field",
        "unrelated",
    ]
    for i, line in enumerate(lines):
        index.add(i, line)
    assert index.search(query, 5)[0][0] == key


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.text("abc ", max_size=12)), max_size=30))
def test_bm25_after_deletions_equals_a_fresh_index(steps: list[tuple[bool, int, str]]) -> None:
    index, kept = BM25(), {}
    for add, key, text in steps:
        index.remove([key])
        kept.pop(key, None)
        if add:
            index.add(key, text)
            kept[key] = text
    fresh = BM25()
    for key, text in kept.items():
        fresh.add(key, text)
    for query in ("a", "ab c", "abc"):
        assert dict(index.search(query, 20)) == pytest.approx(dict(fresh.search(query, 20)))


def test_terms_fold_split_and_keep_exact_forms() -> None:
    assert terms("Đường") == ["duong", "=đường"]
    assert terms("getUserName") == ["getusername", "get", "user", "name"]
    assert terms("东京") == ["东", "京", "东京"]


def test_pairs_of_syllables_count_in_vietnamese_alone() -> None:
    index = BM25()
    index.add(1, "Nhà máy sản xuất điện ở miền bắc.")  # "nhà máy", factory
    index.add(2, "Nhà của tôi có một cái máy giặt mới.")  # house, machine: the syllables apart
    index.add(3, "The power plant is in the north.")
    for query in ("nhà máy", "nha may", "NHÀ MÁY", unicodedata.normalize("NFD", "nhà máy")):
        scores = dict(index.search(query, 3))
        assert scores[1] > 1.3 * scores[2], query
    alone = BM25()
    alone.add(3, "The power plant is in the north.")
    assert alone.search("power plant", 1)[0][1] == pytest.approx(
        sum(alone.search(w, 1)[0][1] for w in ("power", "plant"))
    )
    assert not has_syllables("L'été dernier, l'élève a présenté son œuvre à l'école.")
    assert has_syllables("Một con mèo đen ngủ trên mái nhà.")


def test_best_rows_are_those_of_a_full_sort() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 5, 200).astype(np.float32)
    expected = [i for i in np.argsort(-scores, kind="stable") if scores[i] > 0]
    for limit in (1, 7, 150, 200, 500):
        assert best_rows(scores, limit) == expected[:limit]
    assert best_rows(np.zeros(3, np.float32), 2) == []


def test_dense_index_equals_brute_force_and_forgets() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = DenseIndex(8)
    index.add(list(range(100, 140)), vectors)
    index.remove([105, 139])
    query = vectors[5]
    expected = [int(k) + 100 for k in np.argsort(-(vectors @ query), kind="stable") if k not in (5, 39)]
    assert [k for k, _ in index.search(query, 99)] == expected
    assert [k for k, _ in index.search(query, 5, allowed=[101, 105, 110])] == [k for k in expected if k in (101, 110)]
    assert index.search(np.full(8, np.nan, np.float32), 3) == []
    assert index.vectors([110])[0] == pytest.approx(vectors[10])


def test_two_processes_never_own_one_store(tmp_path: Path) -> None:
    store = Store(tmp_path, "model-a")
    with pytest.raises(StoreLocked, match="in use"):
        Store(tmp_path, "model-a")
    store.close()
    with pytest.raises(EmbedderMismatch, match=r"model-a.*model-b"):
        Store(tmp_path, "model-b")


CRASHER = """
import sys
from pathlib import Path
from retrieval.api import IngestRequest, SourceFile
from retrieval.retriever import Retriever
r = Retriever(Path(sys.argv[1]), Path(sys.argv[2]))
r.embedder.load()
print("go", flush=True)
for i in range(1000):
    text = "\\n\\n".join(f"Document {i} part {j} of twelve." for j in range(12))
    r.ingest(IngestRequest((SourceFile(f"{i}.txt", text.encode()),)))
    print(i, flush=True)
"""


def test_a_kill_during_ingest_leaves_whole_documents_only(
    tmp_path: Path, embedder_path: Path, embedder: Embedder
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CRASHER, str(tmp_path), str(embedder_path)], stdout=subprocess.PIPE, text=True, cwd=REPO
    )
    assert child.stdout is not None
    done = -1
    for line in child.stdout:
        done = -1 if line.startswith("go") else int(line)
        if done >= 3:
            os.kill(child.pid, signal.SIGKILL)
            break
    child.wait()
    child.stdout.close()
    with Retriever(tmp_path, embedder_path) as r:
        r.embedder = embedder
        documents = r.documents(limit=1000)
        assert len(documents) >= done + 1
        for d in documents:
            assert len(r.passages(d.document_id)) == d.num_passages
        assert "Document 2 part" in found(r, "Document 2 part 7", mode=SearchMode.LEXICAL)[0]
        assert r.delete(documents[0].document_id)


def test_a_real_pdf_is_cited_by_page(retriever: Retriever, shared_data: Path) -> None:
    data = (shared_data / "sec10q" / "2023_Q1_AAPL.pdf").read_bytes()
    job = ingest(retriever, SourceFile("2023_Q1_AAPL.pdf", data))
    assert job.documents[0].num_passages > 50
    hit = retriever.search(SearchRequest("What were total net sales of iPhone?")).hits[0]
    assert hit.passage.page is not None
    assert "iPhone" in hit.passage.text


def test_importing_retrieval_is_light() -> None:
    heavy = "{'torch', 'faiss', 'transformers', 'sentence_transformers'}"
    subprocess.run([sys.executable, "-c", f"import sys, retrieval; assert not {heavy} & set(sys.modules)"], check=True)


def test_questions_of_a_real_set_are_answered_from_the_right_paragraph(retriever: Retriever, shared_data: Path) -> None:
    import gzip

    def lines(name: str) -> list[dict[str, Any]]:
        with gzip.open(shared_data / "xquad_vi" / name, "rt", encoding="utf-8") as f:
            return [json.loads(line) for line in f]

    corpus = lines("corpus.jsonl.gz")[:25]
    ids = {d["_id"] for d in corpus}
    ingest(retriever, *(text_file(f"{d['_id']}.txt", d["text"], document_id=str(d["_id"])) for d in corpus))
    qrels = dict(line.split("\t")[:2] for line in (shared_data / "xquad_vi" / "qrels.tsv").read_text().splitlines()[1:])
    questions = [q for q in lines("queries.jsonl.gz") if qrels.get(q["_id"]) in ids]
    results = retriever.search_many([SearchRequest(q["text"]) for q in questions])
    right = sum(r.hits[0].document_id == qrels[q["_id"]] for q, r in zip(questions, results, strict=True))
    assert len(questions) > 20
    assert right / len(questions) >= 0.85


def test_a_job_goes_on_after_a_restart_and_what_failed_can_be_retried(
    tmp_path: Path, embedder_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = (text_file("a.txt", "Apples."), text_file("b.txt", "poison ships"), SourceFile("x.exe", b"MZ"))
    with Retriever(tmp_path, embedder_path) as r:
        job = r.submit(IngestRequest(sources))
        assert (job.state, r.job("", job.job_id)) == (JobState.PENDING, job)
    whole = embedder.embed_passages

    def fail(texts: Any) -> Any:
        if any("poison" in t for t in texts):
            raise RuntimeError("the embedder broke")
        return whole(texts)

    with Retriever(tmp_path, embedder_path) as r:
        r.embedder = embedder
        monkeypatch.setattr(embedder, "embed_passages", fail)
        assert [j.job_id for j in r.unfinished_jobs()] == [job.job_id]
        seen: list[int] = []
        done = r.run_job(job, lambda j: seen.append(j.num_done))
        assert (done.state, done.num_done, seen) == (JobState.DONE, 3, [3, 3])
        assert [d.source for d in done.documents] == ["a.txt"]
        assert [(e.name, e.code) for e in done.errors] == [("b.txt", "internal_error"), ("x.exe", "unsupported_type")]
        assert r.unfinished_jobs() == []
        monkeypatch.undo()
        again = r.retry_job("", job.job_id)
        assert (again.state, again.num_done, [e.name for e in again.errors]) == (JobState.PENDING, 2, ["x.exe"])
        mended = r.run_job(again, lambda _: None)
        assert (mended.num_done, [d.source for d in mended.documents]) == (3, ["a.txt", "b.txt"])
        assert r.job("", job.job_id) == mended
        for tenant, job_id, why in (("", job.job_id, "no source"), ("", "nope", "no job"), ("t", job.job_id, "no job")):
            with pytest.raises(ValueError, match=why):
                r.retry_job(tenant, job_id)


def test_small_documents_fill_the_embedders_batches(retriever: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = retriever.embedder.embed_passages

    def note(texts: Any) -> Any:
        sizes.append(len(texts))
        return whole(texts)

    monkeypatch.setattr(retriever.embedder, "embed_passages", note)
    job = ingest(retriever, *(text_file(f"{i}.txt", f"Text number {i}.") for i in range(100)))
    assert sizes == [64, 36]
    assert [d.source for d in job.documents] == [f"{i}.txt" for i in range(100)]
    assert found(retriever, "Text number 77.")[0] == "Text number 77."
