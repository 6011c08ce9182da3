"""``stepcast convert IN OUT --to FORMAT``."""

import argparse
import os
import sys

from stepcast.cli.applicable import check_applicable
from stepcast.cli.documents import add_edit_arguments, expand, read_document
from stepcast.cli.output import print_json, print_warnings, write_file
from stepcast.inputs.table import set_files
from stepcast.outputs.table import TARGETS, target_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        metavar="IN",
        help="file of any known format, - for standard input, or the folder or prefix of one run",
    )
    parser.add_argument(
        "output",
        metavar="OUT",
        help="file to write (.gz compresses), or - for standard output; chakra: PREFIX of a file per rank",
    )
    parser.add_argument(
        "--to", required=True, choices=[target.name for target in TARGETS], help="format to write"
    )
    parser.add_argument("--json", action="store_true", help="say what was done as one JSON object")
    add_edit_arguments(parser)


def run(args: argparse.Namespace) -> int:
    to_stdout = args.output == "-"
    if to_stdout and args.json:
        raise ValueError("--json and - both take standard output: write to a file, or leave --json out")
    document = read_document([args.input], args)
    check_applicable(args, kinds={type(document).__name__}, file=args.input)
    target = target_named(args.to)
    names, size = [], 0
    inputs = [] if args.input == "-" else expand([args.input])
    read = {os.path.realpath(file) for path in inputs for file in set_files(path)}
    for name, data in target.files(document, args.output):
        if os.path.realpath(name) in read:
            raise ValueError(f"{name}: is a file to read; give another name to write")
        size += sys.stdout.buffer.write(data) if name == "-" else write_file(name, data)
        names.append(name)
    warnings = [*getattr(document, "warnings", ()), *target.losses(document)]
    if args.json:
        result = {"format": target.name, "output": args.output, "files": names, "bytes": size}
        print_json({**result, "warnings": warnings})
    else:
        print_warnings(warnings)
        if not to_stdout:
            written = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
            print(f"wrote {written}: {target.title}, {size:,} bytes")
    return 0
