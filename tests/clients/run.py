"""Unchanged clients in an environment of their own, against a server of ours: `make clients` and `make fuzz-api`.

python tests/clients/run.py clients PYTHON    LangChain and llm, with the default model
python tests/clients/run.py fuzz PYTHON       schemathesis over our own OpenAPI document, with a tiny model
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from server_process import Server  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

FACT = "The lighthouse of Kelmar was built in 1874. Its lamp burns 12 litres of oil each night."
LLM_MODELS = """
- model_id: kelmar
  model_name: rag:facts
  api_base: {url}/v1
- model_id: plain
  model_name: default
  api_base: {url}/v1
"""


def main() -> int:
    """Entry point; returns 1 if a client failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["clients", "fuzz"])
    parser.add_argument("python", type=Path, help="python of the environment that has the clients")
    parser.add_argument("--max-examples", type=int, default=25, help="of each operation and phase of the fuzz")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, scripts = Path(name), args.python.absolute().parent
        if args.what == "clients":
            return serve(folder, lambda s: run_clients(s, scripts, folder))
        model = make_tiny_model(folder / "tiny")
        flags = ("--model", str(model), "--kv-cache-tokens", "8192", "--default-max-tokens", "8")
        return serve(folder, lambda s: fuzz(s, scripts, folder, args.max_examples), *flags)


def serve(folder: Path, work: Callable[[Server], bool], *flags: str) -> int:
    """Run work against a server with one document; it must be well and without a fault in its log afterwards."""
    server = Server(folder, *flags)
    try:
        server.wait_ready(180)
        assert server.post("/rag/documents", documents=[{"id": "lamp", "text": FACT}], collection="facts").is_success
        is_good = work(server) and server.status("/health/ready") == 200
        is_good &= server.metric("foreword_engine_restarts") == 0
        log = server.read_log()
        print(log if "Traceback" in log else "the server's log holds no traceback")
        return 0 if is_good and "Traceback" not in log else 1
    finally:
        server.stop()


def run_clients(server: Server, scripts: Path, folder: Path) -> bool:
    """LangChain's chat and embeddings, then the llm command with our models among its own."""
    is_good = run([scripts / "python", HERE / "langchain_client.py", f"{server.url}/v1"], {}) is not None
    home = folder / "llm"
    home.mkdir()
    (home / "extra-openai-models.yaml").write_text(LLM_MODELS.format(url=server.url), encoding="utf-8")
    for model, flags, question, word in (
        ("kelmar", ["--no-stream"], "When was the lighthouse of Kelmar built?", "1874"),
        ("kelmar", [], "When was the lighthouse of Kelmar built?", "1874"),
        ("plain", ["-o", "temperature", "0", "-o", "max_tokens", "24"], "What is the capital of Japan?", "Tokyo"),
    ):
        said = run([scripts / "llm", "-m", model, "--key", "unused", *flags, question], {"LLM_USER_PATH": str(home)})
        is_good &= said is not None and word in said
        print(f"llm -m {model}: {'ok' if said and word in said else f'FAILED: {said}'}")
    return is_good


def fuzz(server: Server, scripts: Path, folder: Path, max_examples: int) -> bool:
    """No answer of 500 or above and none of another shape than the document says, whatever is sent.

    Names that a random text never hits, of models and collections, are those that exist.
    """
    document = server.client.get("/docs/openapi.json").json()
    known = {"model": ["default", "rag:facts"], "collection": ["facts", "other"]}
    for schema in document["components"]["schemas"].values():
        for field, names in known.items():
            if field in schema.get("properties", {}):
                schema["properties"][field] = {"type": "string", "enum": names}
    (folder / "openapi.json").write_text(json.dumps(document), encoding="utf-8")
    checks = "not_a_server_error,response_schema_conformance,content_type_conformance"
    flags = ["--checks", checks, "--max-examples", str(max_examples), "--seed", "1", "--request-timeout", "30"]
    command = [
        scripts / "st",
        "run",
        folder / "openapi.json",
        "--url",
        server.url,
        *flags,
        "--generation-database",
        "none",
    ]
    return run(command, {}) is not None


def run(command: list[object], variables: dict[str, str]) -> str | None:
    """What a command printed, shown here too; None if it failed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(list(map(str, command)), env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
