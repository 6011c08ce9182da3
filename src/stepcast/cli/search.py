"""``stepcast search --model M --cluster C --gpus N --global-batch B ...``"""

import argparse
from typing import TYPE_CHECKING, Any

from stepcast import __version__
from stepcast.cli.choices import GIVEN, gpu_counts
from stepcast.cli.interrupts import INTERRUPTED
from stepcast.cli.numbers import BINARY, MOST_SEQUENCES, MOST_TOKENS, count, positive, price
from stepcast.cli.output import new_file, print_json, terminal_width, write_file
from stepcast.cli.pages import add_page_argument, told_page, write_page
from stepcast.units import parse_count, parse_duration_s, parse_size_bytes

if TYPE_CHECKING:
    from stepcast.pages.document import About, Page
    from stepcast.searching.best import Result

OBJECTIVES = ("step", "throughput", "cost", "memory", "energy")
MOST_ROWS = 1000
MOST_WORKERS = 1024
WRITTEN = (".csv", ".parquet", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="MODEL", nargs="?", help="the model, as --model names it")
    parser.add_argument("--model", metavar="M", help="name in the catalogue, or a config.json")
    parser.add_argument(
        "--cluster", metavar="C", help="name in the catalogue, a GPU (one node of it), or a TOML file"
    )
    parser.add_argument("--gpu", metavar="G", help="or GPUs of one node: as many as --gpus says")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the cluster, as node.nics=4"
    )
    parser.add_argument(
        "--gpus",
        type=gpu_counts,
        metavar="N|A,B|A..B",
        help="GPUs in all; A..B doubles from A to B (default: all, where the cluster is of one size)",
    )
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--global-batch", type=count(1, MOST_SEQUENCES, BINARY), metavar="N", help="sequences in a step"
    )
    batch.add_argument(
        "--tokens-per-batch", type=positive(parse_count), metavar="N", help="tokens in a step, as 4M"
    )
    parser.add_argument("--seq", type=count(1, MOST_TOKENS, BINARY), metavar="N", help="tokens in a sequence")
    parser.add_argument(
        "--framework", default="megatron-core", metavar="F", help="whose habits fill the rest"
    )
    names = ", ".join(GIVEN)
    parser.add_argument(
        "--fix", action="append", default=[], metavar="NAME=VALUE", help=f"a choice that is made: {names}"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="NAME=A,B", help="the values that a choice may take"
    )
    parser.add_argument(
        "--objective", choices=OBJECTIVES, default="step", help="what to make least (or most)"
    )
    parser.add_argument(
        "--max-memory", type=positive(parse_size_bytes), metavar="SIZE", help="of a GPU, such as 70GiB"
    )
    parser.add_argument(
        "--top", type=count(1, MOST_ROWS), default=10, metavar="K", help="strategies to rank (default 10)"
    )
    parser.add_argument(
        "--tokens", type=positive(parse_count), metavar="N", help="also tell days and GPU-hours, as 15T"
    )
    parser.add_argument("--price", type=price, metavar="X", help="with --tokens: of a GPU-hour")
    parser.add_argument(
        "--time",
        type=positive(parse_duration_s),
        metavar="T",
        help="end after so long, as 60s, with the best so far",
    )
    parser.add_argument(
        "--workers", type=count(1, MOST_WORKERS), metavar="N", help="processes (default: as many as cores)"
    )
    parser.add_argument(
        "-o", "--output", type=new_file, metavar="FILE", help="write the rows as .csv, .parquet or .json"
    )
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from stepcast.cli.search_facts import search_facts
    from stepcast.cli.search_question import question_of
    from stepcast.report.search import search_text

    if args.price is not None and args.tokens is None:
        raise ValueError("--price has no effect: it is of a whole run; give --tokens as well, such as 1T")
    _check_output(args.output)
    asked = question_of(args)
    result = asked.answer()
    found = {**search_facts(asked, result), "command": args.command, "version": __version__}
    if args.output:
        write_file(args.output, _document(args.output, found))
    write_page(args, lambda about: result_page(found, result, about))
    if args.json:
        print_json(found)
    else:
        print(search_text(found, terminal_width()))
        if args.html:
            print(f"\n{told_page(args)}")
    if not result.counts.complete and not result.counts.out_of_time:
        return INTERRUPTED
    return 0 if result.best else 1


def result_page(found: dict[str, Any], result: "Result", about: "About") -> "Page":
    from stepcast.cli.choices import all_words
    from stepcast.ir.facts import CandidateFacts
    from stepcast.pages.search import search_page
    from stepcast.report.search import strategy_words

    simulated = [
        CandidateFacts(
            words=strategy_words(all_words(each.strategy)),
            step_s=each.step_s,
            memory_bytes=each.memory_bytes,
            gpus=each.gpus,
        )
        for each in result.simulated
    ]
    return search_page(found, about, simulated)


def _check_output(name: str | None) -> None:
    if not name:
        return
    if not name.endswith(WRITTEN):
        raise ValueError(f"{name}: name a file that ends in {', '.join(WRITTEN[:-1])} or {WRITTEN[-1]}")
    if name.endswith(".parquet"):
        from stepcast.outputs.rows import check_parquet

        check_parquet()


def _document(name: str, found: dict[str, Any]) -> bytes:
    if name.endswith(".json"):
        import msgspec

        return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
    from stepcast.outputs.rows import table_bytes

    return table_bytes(name, found["rows"])
