"""The `foreword` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version

from gateway.key_commands import add_keys_command
from gateway.models import (
    MODELS,
    ModelError,
    cache_folder,
    fetch_model,
    is_fetched,
    model_folder,
    resolve_embedder,
    verify_model,
)
from gateway.settings import SettingsError, add_flags, load_settings, markdown_table
from retrieval import DEFAULT_COLLECTION

LOCAL = frozenset(
    {"host", "port", "data_dir", "store", "embedder", "embed_threads", "offline", "model", "dtype", "log_level"}
)
"""Settings that commands other than serve take as flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 failed, 2 not understood."""
    args = make_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except (SettingsError, ModelError) as e:
        print(f"foreword: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The command line; flags of settings come from the structs."""
    parser = argparse.ArgumentParser(prog="foreword", description="RAG serving that never prefills a context twice.")
    parser.add_argument("--version", action="version", version=f"foreword {version('foreword')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start the server")
    add_flags(serve)
    serve.set_defaults(run=_serve)

    demo = commands.add_parser("demo", help="ingest the project's own docs, serve, ask one question")
    add_flags(demo)
    demo.set_defaults(run=_demo)

    ingest = commands.add_parser("ingest", help="add files and folders to a collection")
    ingest.add_argument("paths", nargs="+", metavar="PATH", help="files, folders or globs; - reads standard input")
    ingest.add_argument("--collection", default=DEFAULT_COLLECTION, help="Default: %(default)s.")
    add_flags(ingest, LOCAL)
    ingest.set_defaults(run=_ingest)

    ask = commands.add_parser("ask", help="ask a question")
    ask.add_argument("question", metavar="QUESTION")
    ask.add_argument("--collection", default=DEFAULT_COLLECTION, help="Default: %(default)s.")
    ask.add_argument("--top-k", type=int, default=5, help="Passages to retrieve. Default: %(default)s.")
    ask.add_argument("--max-tokens", type=int, default=256, help="Longest answer. Default: %(default)s.")
    ask.add_argument("--json", action="store_true", help="print the whole reply as JSON")
    add_flags(ask, LOCAL)
    ask.set_defaults(run=_ask)

    models = commands.add_parser("models", help="list, fetch or verify the default models")
    actions = models.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("list", help="what there is").set_defaults(run=_models_list)
    for action, run in (("fetch", _models_fetch), ("verify", _models_verify)):
        sub = actions.add_parser(action, help=f"{action} the named models, or all")
        sub.add_argument("names", nargs="*", metavar="NAME")
        sub.set_defaults(run=run)

    add_keys_command(commands)

    evaluation = commands.add_parser("eval", help="measure quality on a data set", add_help=False)
    evaluation.add_argument("kind", choices=["retrieval"])
    evaluation.add_argument("rest", nargs=argparse.REMAINDER, help="see `foreword eval retrieval --help`")
    evaluation.set_defaults(run=_eval_retrieval)

    bench = commands.add_parser("bench", help="measure servers, or the engine in this process", add_help=False)
    bench.add_argument("kind", choices=["serve", "engine", "retrieval"])
    bench.add_argument("rest", nargs=argparse.REMAINDER, help="see `foreword bench serve --help`")
    bench.set_defaults(run=_bench)

    settings = commands.add_parser("settings", help="print all settings as a Markdown table")
    settings.set_defaults(run=lambda _: print(markdown_table()) or 0)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from gateway.serve import serve

    return serve(load_settings(vars(args)))


def _demo(args: argparse.Namespace) -> int:
    from gateway.serve import demo

    return demo(load_settings(vars(args)))


def _ingest(args: argparse.Namespace) -> int:
    from gateway.commands import ingest

    return ingest(load_settings(vars(args)), args.paths, args.collection)


def _ask(args: argparse.Namespace) -> int:
    from gateway.commands import ask

    body = {"query": args.question, "collection": args.collection, "top_k": args.top_k, "max_tokens": args.max_tokens}
    return ask(load_settings(vars(args)), body, as_json=args.json)


def _eval_retrieval(args: argparse.Namespace) -> int:
    from retrieval import run_evaluation

    return _on_datasets(args, run_evaluation, "eval")


def _on_datasets(args: argparse.Namespace, run: Callable[..., int], folder: str) -> int:
    """A command of retrieval's, which keeps its indexes in the cache folder."""
    say = partial(print, file=sys.stderr)

    def resolve(name: str | None) -> str:
        g = load_settings({"embedder": name}).gateway
        return resolve_embedder(g.embedder, offline=g.offline, say=say, verbose=True)

    try:
        return run(args.rest, resolve, cache_folder() / folder, say)
    except ValueError as e:
        print(f"foreword: {e}", file=sys.stderr)
        return 2


def _bench(args: argparse.Namespace) -> int:
    if args.kind == "serve":
        from loadtest import serve_bench

        return serve_bench.main(args.rest)
    if args.kind == "retrieval":
        from retrieval import run_bench

        return _on_datasets(args, run_bench, "bench")
    from loadtest import engine_bench

    return engine_bench.main(args.rest)


def _models_list(_: argparse.Namespace) -> int:
    for spec in MODELS:
        state = str(model_folder(spec)) if is_fetched(spec) else "not fetched"
        print(f"{spec.name:24}{spec.kind:10}{spec.licence:12}{state}")
    return 0


def _models_fetch(args: argparse.Namespace) -> int:
    for name in args.names or [s.name for s in MODELS]:
        print(fetch_model(name, print, verbose=True))
    return 0


def _models_verify(args: argparse.Namespace) -> int:
    for name in args.names or [s.name for s in MODELS]:
        verify_model(name)
        print(f"{name}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
