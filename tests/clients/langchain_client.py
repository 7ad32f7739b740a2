"""LangChain's OpenAI classes against a server of ours: whole, streamed, batched, over documents, and embeddings."""

from __future__ import annotations

import asyncio
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

QUESTION = "When was the lighthouse of Kelmar built?"


def main(url: str) -> None:
    """Raises `AssertionError` where a reply is not what the client must see."""
    given = {"base_url": url, "api_key": "unused", "max_retries": 0}
    rag = ChatOpenAI(model="rag:facts", **given)
    whole = rag.invoke(QUESTION)
    assert "1874" in whole.content, whole
    assert whole.usage_metadata["input_tokens"] > 0
    chunks = list(rag.stream(QUESTION))
    assert "".join(c.content for c in chunks) == whole.content
    assert sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks) > 0
    history = [SystemMessage("Be brief."), HumanMessage("Hello."), AIMessage("Hello!"), HumanMessage(QUESTION)]
    assert "1874" in rag.invoke(history).content
    plain = ChatOpenAI(model="default", temperature=0, max_tokens=24, **given)
    assert "Tokyo" in asyncio.run(plain.ainvoke("What is the capital of Japan?")).content
    assert len(plain.batch(["Say one.", "Say two.", "Say three."])) == 3
    embedder = OpenAIEmbeddings(model="all-MiniLM-L6-v2", check_embedding_ctx_length=False, **given)
    rows = embedder.embed_documents(["A lighthouse by the sea.", "Rye bread."])
    asked = embedder.embed_query("Where is the lighthouse?")
    near, far = (sum(a * b for a, b in zip(row, asked, strict=True)) for row in rows)
    assert near > far + 0.2
    print("langchain-openai: ok")


if __name__ == "__main__":
    main(sys.argv[1])
