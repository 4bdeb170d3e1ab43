"""`tandem ask URL QUESTION`: one question to a running deployment; the answer, and where its time went."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from ..up.ask import AskError, ask, served_names, timing_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from ..up.ask import Answer


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "ask", help="one question to a running deployment, with timing", description=__doc__
    )
    parser.add_argument("url", help="of a router, as http://127.0.0.1:8000")
    parser.add_argument("question")
    parser.add_argument("--model", help="its served name, where the URL serves more than one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        answer = asyncio.run(_ask(arguments.url.rstrip("/"), arguments.model, arguments.question))
    except AskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_answer(arguments.question, answer)
    return 0


async def _ask(url: str, model: str | None, question: str) -> Answer:
    if model is None:
        served = await served_names(url)
        if len(served) != 1:
            raise AskError(f"{url} serves {', '.join(served) or 'no model'}: choose one with --model")
        (model,) = served
    return await ask(url, model, question)


def print_answer(question: str, answer: Answer, more: Iterable[tuple[str, str]] = ()) -> None:
    print(f"\n{question}\n\n  {answer.text.strip()}\n")
    rows = [*timing_table(answer), *more]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"  {label:<{width}}  {value}")
