"""``stepcast convert IN OUT --to FORMAT``."""

import argparse
from dataclasses import replace

from stepcast.cli.captured import build_workload
from stepcast.cli.documents import read_document
from stepcast.cli.options import check_applicable
from stepcast.cli.output import print_data, print_json, print_warnings, write_files
from stepcast.outputs.table import TARGETS, target_named
from stepcast.views.text import visible


def run(args: argparse.Namespace) -> int:
    to_stdout = args.output == "-"
    if to_stdout and args.json:
        raise ValueError("--json and - both take standard output: write to a file, or leave --json out")
    to = args.to or ("cluster" if args.output.endswith(".toml") else None)
    if to is None:
        known = ", ".join(target.name for target in TARGETS)
        raise ValueError(f"no format given: use --to with one of {known}; OUT.toml is a cluster description")
    document = read_document([args.input], args)
    check_applicable(args, kinds={type(document).__name__}, file=args.input)
    target = target_named(to)
    if type(document).__name__ == "Captured" and target.takes == "workload":
        document = build_workload(document, args)
    elif args.gpu and type(document).__name__ == "Wiring":
        document = replace(document, gpu=args.gpu)
    elif args.gpu:
        raise ValueError("--gpu has no effect: it is for captured programs and topologies")
    files = target.files(document, args.output)
    sizes = {name: print_data(data) for name, data in files} if to_stdout else write_files(files)
    names, size = list(sizes), sum(sizes.values())
    warnings = [*getattr(document, "warnings", ()), *target.losses(document)]
    if args.json:
        result = {"format": target.name, "output": args.output, "files": names, "bytes": size}
        print_json({**result, "warnings": warnings})
    else:
        print_warnings(warnings)
        if not to_stdout:
            written = " to ".join(visible(name) for name in dict.fromkeys((names[0], names[-1])))
            print(f"wrote {written}: {target.title}, {size:,} bytes")
    return 0
