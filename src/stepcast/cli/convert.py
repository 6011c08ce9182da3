"""``stepcast convert IN OUT --to FORMAT``."""

import argparse
import gzip
import sys
from pathlib import Path

from stepcast.cli.documents import add_edit_arguments, read_document
from stepcast.cli.output import print_json, print_warnings
from stepcast.outputs.table import TARGETS, target_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", metavar="IN", help="file of any known format, or a folder that holds one run"
    )
    parser.add_argument(
        "output", metavar="OUT", help="file to write (.gz compresses), or - for standard output"
    )
    parser.add_argument(
        "--to", required=True, choices=[target.name for target in TARGETS], help="format to write"
    )
    parser.add_argument("--json", action="store_true", help="say what was done as one JSON object")
    add_edit_arguments(parser)


def run(args: argparse.Namespace) -> int:
    document = read_document([args.input], args)
    target = target_named(args.to)
    data = target.write(document)
    warnings = [*getattr(document, "warnings", ())]
    if args.to == "chakra":
        from stepcast.outputs.chakra import losses

        warnings += losses(document)
    if args.output == "-":
        sys.stdout.buffer.write(data)
    else:
        if args.output.endswith(".gz"):
            data = gzip.compress(data, mtime=0)
        Path(args.output).write_bytes(data)
    if args.json and args.output != "-":
        print_json({"format": target.name, "output": args.output, "bytes": len(data), "warnings": warnings})
    else:
        print_warnings(warnings)
        if args.output != "-":
            print(f"wrote {args.output}: {target.title}, {len(data):,} bytes")
    return 0
