"""Linked passages between tenants, as their callers see them."""

from __future__ import annotations

from keyed_server import Keyed

DOCUMENTS = [{"text": f"{name} keeps the night watch, and tells nobody what was seen. " * 2} for name in "ABC"]
MESSAGES = [{"role": "system", "content": "Both ask alike."}, {"role": "user", "content": "Who keeps watch?"}]


def linked_tokens(keyed: Keyed, who: str, documents: list[dict[str, str]]) -> tuple[int, int]:
    """(prefix, linked) tokens of a linked chat."""
    body = {"model": "default", "messages": MESSAGES, "documents": documents, "max_tokens": 1, "cache": "linked"}
    reply = keyed.post(who, "/v1/chat/completions", **body)
    assert reply.status_code == 200, reply.text
    details = reply.json()["usage"]["prompt_tokens_details"]
    return details["prefix_tokens"], details["linked_tokens"]


def test_another_tenants_passages_are_never_linked(keyed: Keyed) -> None:
    assert linked_tokens(keyed, "ann", DOCUMENTS) == (0, 0)
    prefix, linked = linked_tokens(keyed, "ann_reads", DOCUMENTS[::-1])
    assert prefix > 0
    assert linked > 100
    assert linked_tokens(keyed, "bob", DOCUMENTS[::-1]) == (0, 0), "the same text, of another tenant"
    assert linked_tokens(keyed, "bob", DOCUMENTS)[1] > 100
