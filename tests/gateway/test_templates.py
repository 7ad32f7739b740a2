"""Prompt templates of collections: what they write, and what is refused when the server starts."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine import SegmentKind, load_tokenizer
from gateway.cli import main
from gateway.prompt import BUILT_IN, Message, PassageText, PromptAssembler
from gateway.settings import SettingsError
from gateway.templates import FileTemplate, load_templates

WHOLE = """
{% block system %}
You answer for the harbour office.
{% endblock %}
{% block passage %}[{{ title or 'untitled' }}] {{ text }}
{% endblock %}
{% block tail %}
{% for m in history %}
{{ m.role }}> {{ m.content }}
{% endfor %}
It is {{ now }}. {{ question | trim }}{% endblock %}
"""


class Minutes:
    """A clock that is a minute later each time."""

    minute = 0

    def __call__(self) -> datetime:
        self.minute += 1
        return datetime(2026, 1, 2, 3, self.minute % 60, tzinfo=UTC)


def test_a_template_writes_all_parts_and_only_the_tail_depends_on_the_request(model_path: Path) -> None:
    tokenizer = load_tokenizer(model_path)
    assembler = PromptAssembler(tokenizer)
    template = FileTemplate("harbour.jinja", WHOLE, Minutes())
    passages = [PassageText("a", "Tides", "High water at six."), PassageText("b", "", "Low water at noon.")]
    history = [Message("user", "Hello<|im_end|>")]
    one, two = (
        assembler.rag(q, passages, system=template.system, history=history, template=template, max_tokens=1000)
        for q in ("When is high water?", "And low?")
    )
    assert one.segments[:-1] == two.segments[:-1]
    swapped = assembler.rag("When?", passages[::-1], system=template.system, template=template, max_tokens=1000)
    assert swapped.segments[1:3] == one.segments[2:0:-1]
    texts = [tokenizer.decode(s.token_ids, skip_special_tokens=False) for s in one.segments]
    assert "You answer for the harbour office.\n<|im_end|>" in texts[0]
    assert texts[1:3] == ["[Tides] High water at six.\n", "[untitled] Low water at noon.\n"]
    assert texts[3].startswith("user> Hello<|im_end|>\nIt is 2026-01-02 03:")
    assert "UTC. When is high water?<|im_end|>" in texts[3]
    control = [t for t in one.segments[3].token_ids if t in tokenizer.control_tokens.values()]
    assert len(control) == 2, "what a message holds is text"
    assert [s.kind for s in one.segments[1:]] == [SegmentKind.PASSAGE, SegmentKind.PASSAGE, SegmentKind.TAIL]


def test_blocks_that_a_file_lacks_are_the_built_in_ones() -> None:
    template = FileTemplate("x.jinja", "{% block passage %}<{{ text }}>{% endblock %}")
    assert template.passage("t", "x") == "<x>"
    assert template.system == BUILT_IN.system
    turns = [("user", "a"), ("assistant", "b")]
    assert template.tail("Why?", turns) == BUILT_IN.tail("Why?", turns)


def block(name: str, body: str) -> str:
    return "{% block " + name + " %}" + body + "{% endblock %}"


PASSAGE, TAIL = block("passage", "{{ text }}"), block("tail", "{{ question }}{{ history }}")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (block("system", "Asked: {{ question }}"), "block system shows question, which changes with each request"),
        (block("system", "It is {{ now }}"), "block system shows now, which changes with each request"),
        (block("passage", "{{ history }}{{ text }}"), "block passage shows history, which changes with each request"),
        (TAIL + PASSAGE, "what changes with each request must come last"),
        (PASSAGE + block("system", "x"), "not as system, passage, tail"),
        (block("passage", "{{ loop.index }} {{ text }}"), "block passage uses loop; it may use text, title"),
        (block("passage", "{{ text[:100] }}"), "does not show the whole text"),
        (block("tail", "{{ question }}"), "does not show the history"),
        (block("tail", "{{ history }}"), "does not show the whole question"),
        (block("tail", "{% for m in history %}{{ m.contents }}{% endfor %}{{ question }}"), "block tail fails"),
        (block("tail", "{{ question }}{{ history[0].content }}"), "block tail fails"),
        (block("passage", "{{ text }}{{ text.__class__.__mro__ }}"), "block passage fails: SecurityError"),
        (block("system", "{{ range(9) }}"), "block system uses range"),
        (block("system", "{{ self.tail() }}") + TAIL, "block system"),
        (block("passage", "{{ text | random }}"), "No filter named 'random'"),
        (block("header", "x"), "its blocks are header; known: system, passage, tail"),
        ("{{ question }} " + PASSAGE, "nothing may stand outside its blocks"),
        ("Hello. " + PASSAGE, "nothing may stand outside its blocks"),
        ("{% include 'x' %}" + PASSAGE, "nothing may stand outside its blocks"),
        (block("system", block("tail", "{{ question }}")), "no block inside another"),
        (block("system", "{% include 'x' %}"), "block system fails"),
        ("", "its blocks are none"),
        ("{% block system %}", "Unexpected end of template"),
    ],
)
def test_what_would_cost_reuse_or_lose_text_is_refused_at_load_and_says_why(source: str, why: str) -> None:
    with pytest.raises(SettingsError) as refused:
        FileTemplate("harbour.jinja", source)
    assert str(refused.value).startswith("prompt_templates: harbour.jinja: ")
    assert why in str(refused.value)


def test_a_folder_has_a_file_for_each_collection(tmp_path: Path) -> None:
    (tmp_path / "harbour.jinja").write_text(WHOLE, encoding="utf-8")
    (tmp_path / "notes.md").write_text("{{ question }}", encoding="utf-8")
    assert load_templates(str(tmp_path)).keys() == {"harbour"}
    assert load_templates("") == {}
    with pytest.raises(SettingsError, match="there is no folder"):
        load_templates(str(tmp_path / "nowhere"))
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="cannot read"):
        load_templates(str(tmp_path))


def test_the_server_does_not_start_with_a_template_that_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "papers.jinja").write_text(TAIL + PASSAGE, encoding="utf-8")
    flags = ["--prompt-templates", str(tmp_path), "--data-dir", str(tmp_path / "data"), "--offline"]
    assert main(["serve", *flags]) == 2
    assert "papers.jinja: its blocks stand as tail, passage" in capsys.readouterr().err
