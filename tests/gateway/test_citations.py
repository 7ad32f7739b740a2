"""Citations point at what supports a sentence, and only there."""

from __future__ import annotations

from gateway.citations import cite, sentences
from retrieval import Passage

A = Passage("a#0", "a", "Intro words. The tower is 312 metres high. It opened in 1889 in Paris.", 100, 170)
B = Passage("b#0", "b", "The bridge was painted green. Tháp Rùa nằm giữa hồ Hoàn Kiếm.", 0, 62)


def test_a_sentence_is_cited_at_its_exact_span() -> None:
    (c,) = cite("The tower is 312 metres high.", "How high is the tower?", [B, A])
    assert (c.passage.passage_id, c.text) == ("a#0", "The tower is 312 metres high.")
    assert (c.start, c.end) == (113, 142)
    assert (c.answer_start, c.answer_end) == (0, 29)


def test_another_number_is_no_support() -> None:
    assert cite("The tower is 450 metres high.", "How high is the tower?", [A, B]) == []


def test_what_the_question_said_supports_nothing() -> None:
    assert cite("I do not know how high the tower is.", "How high is the tower?", [A, B]) == []
    assert cite("The tower is high.", "Is the tower high?", [A, B]) == []


def test_an_answer_from_elsewhere_cites_nothing() -> None:
    assert cite("Cats sleep for sixteen hours.", "What do cats do?", [A, B]) == []


def test_each_sentence_is_aligned_on_its_own_and_marks_are_folded() -> None:
    found = cite("It opened in 1889 in Paris. Thap Rua nam giua ho Hoan Kiem.", "Tell me.", [A, B])
    assert [c.passage.passage_id for c in found] == ["a#0", "b#0"]


def test_numbers_the_model_wrote_are_not_trusted() -> None:
    (c,) = cite("The bridge was painted green [1].", "What colour?", [A, B])
    assert c.passage.passage_id == "b#0"


def test_sentences_keep_decimals_and_other_scripts_whole() -> None:
    text = "Pi is 3.14 or so. 故乡的歌。 End"
    assert [text[a:b] for a, b in sentences(text)] == ["Pi is 3.14 or so.", "故乡的歌。", "End"]


def test_the_numbers_of_a_list_are_no_sentences() -> None:
    text = "1. Red paint\n2. The bridge was painted green.\n42."
    assert [text[a:b] for a, b in sentences(text)] == ["Red paint", "The bridge was painted green.", "42."]
    numbered = Passage("n#0", "n", "Steps: 1. Open it. 2. Close it.", 0, 31)
    assert cite("1. Cats sleep.\n2. Dogs bark.", "What do pets do?", [numbered]) == []
