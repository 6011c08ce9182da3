"""``stepcast search --model M --cluster C --gpus N --global-batch B ...``"""

import argparse
from typing import TYPE_CHECKING, Any

from stepcast.cli.choices import GIVEN, gpu_counts
from stepcast.cli.interrupts import INTERRUPTED
from stepcast.cli.options import add_options
from stepcast.cli.output import write_file
from stepcast.cli.pages import print_view, write_view
from stepcast.questions.numbers import count, positive
from stepcast.units import DEFAULT_CURRENCY, parse_duration_s
from stepcast.version import __version__

if TYPE_CHECKING:
    from stepcast.searching.result import SearchResult
    from stepcast.views.view import View

OBJECTIVES = ("step", "throughput", "cost", "memory", "energy")
MOST_ROWS = 1000
MOST_WORKERS = 1024
WRITTEN = (".csv", ".parquet", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        name MODEL           the model, as --model names it
        --model M            name in the catalogue, or a config.json
        --cluster C          name in the catalogue, a GPU (one node of it), or a TOML file
        --gpu G              or GPUs of one node: as many as --gpus says
        --set
        --gpus N|A,B|A..B    GPUs in all; A..B doubles from A to B (default: all, where the cluster is of one
                             size)
        """,
        name={"nargs": "?"},
        gpus=gpu_counts,
    )
    batch = parser.add_mutually_exclusive_group()
    add_options(
        batch,
        """
        --global-batch N      sequences in a step
        --tokens-per-batch N  tokens in a step, as 4M
        """,
    )
    add_options(
        parser,
        """
        --seq N        tokens in a sequence
        --framework F  whose habits fill the rest, and what its software can run is searched
        --any-framework  search also schedules, shardings and overlaps that the framework does not have
        """,
        framework="megatron-core",
    )
    names = ", ".join(GIVEN)
    add_options(
        parser,
        f"""
        --fix NAME=VALUE ...  a choice that is made: {names}
        --allow NAME=A,B ...  the values that a choice may take
        --objective           what to make least (or most)
        --max-memory SIZE     most memory of a GPU that a candidate may take, such as 70GiB
        --memory-reserve X    share of each GPU's memory to leave free, such as 10% (default 7%, the margin of
                              the 90 % memory interval, or 0 with --max-memory)
        --top K               strategies to rank (default 10)
        --tokens N            also tell days and GPU-hours, as 15T
        --price X             price per GPU-hour (with --tokens)
        --currency
        --time T              end after so long, as 60s, with the best so far
        --workers N           processes (default: as many as cores)
        -o, --output FILE     write the rows as .csv, .parquet or .json
        --html
        --json
        """,
        objective={"choices": OBJECTIVES, "default": "step"},
        top={"type": count(1, MOST_ROWS), "default": 10},
        time=positive(parse_duration_s),
        workers=count(1, MOST_WORKERS),
    )


def run(args: argparse.Namespace) -> int:
    from stepcast.cli.search_facts import search_facts
    from stepcast.cli.search_question import question_of

    if args.price is not None and args.tokens is None:
        raise ValueError("--price has no effect: it is of a whole run; give --tokens as well, such as 1T")
    if args.price is None and args.currency != DEFAULT_CURRENCY:
        raise ValueError(f"--currency {args.currency} has no effect: give --price as well")
    _check_output(args.output)
    asked = question_of(args)
    result = asked.answer()
    found = {**search_facts(asked, result), "command": args.command, "version": __version__}
    if args.output:
        write_file(args.output, _document(args.output, found))
    view = result_view(found, result)
    write_view(args, view)
    print_view(args, view)
    if not result.counts.complete and not result.counts.out_of_time:
        return INTERRUPTED
    return 0 if result.best else 1


def result_view(found: dict[str, Any], result: "SearchResult") -> "View":
    """Return the view of a search with all the candidates that it simulated."""
    from stepcast.cli.choices import all_words
    from stepcast.ir.facts import CandidateFacts
    from stepcast.views.search import search_view, strategy_words

    simulated = [
        CandidateFacts(
            words=strategy_words(all_words(each.strategy)),
            step_s=each.step_s,
            memory_bytes=each.memory_bytes,
            gpus=each.gpus,
        )
        for each in result.simulated
    ]
    return search_view(found, simulated)


def _check_output(name: str | None) -> None:
    if not name:
        return
    if not name.endswith(WRITTEN):
        raise ValueError(f"{name}: name a file that ends in {', '.join(WRITTEN[:-1])} or {WRITTEN[-1]}")
    if name.endswith(".parquet"):
        from stepcast.outputs.plain import check_parquet

        check_parquet()


def _document(name: str, found: dict[str, Any]) -> bytes:
    if name.endswith(".json"):
        import msgspec

        return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
    from stepcast.outputs.plain import table_bytes

    return table_bytes(name, found["rows"])
