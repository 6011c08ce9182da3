"""``stepcast capture CONFIG|module:function -o FILE``: a PyTorch training step, without a GPU."""

import argparse

from stepcast.cli.numbers import MOST_SEQUENCES, MOST_TOKENS, count, gpu_count
from stepcast.cli.output import new_file, print_json, print_warnings, terminal_width, write_file
from stepcast.report.visible import visible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "program",
        metavar="WHAT",
        help="a Hugging Face config.json, or module:function that returns a model (or model, inputs, loss "
        "and optimizer)",
    )
    parser.add_argument("--batch", type=count(1, MOST_SEQUENCES), default=1, metavar="N", help="sequences: 1")
    parser.add_argument("--seq", type=count(1, MOST_TOKENS), default=2048, metavar="N", help="tokens: 2048")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the weights")
    parser.add_argument(
        "--autocast", action="store_true", help="weights in fp32, products in bf16 (torch.autocast)"
    )
    parser.add_argument(
        "--checkpoint", action="store_true", help="layers computed again in the backward (transformers)"
    )
    parser.add_argument(
        "--attention", metavar="NAME", default="", help="of transformers: sdpa, eager (its own choice)"
    )
    parser.add_argument(
        "--experts", metavar="NAME", default="", help="of transformers: grouped_mm, eager (its own choice)"
    )
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw", help="adamw")
    parser.add_argument(
        "--no-fused-optimizer", action="store_true", help="the update operation by operation (foreach)"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="as torch.compile runs it: memory-bound kernels fused"
    )
    parser.add_argument(
        "-o", "--output", type=new_file, metavar="FILE", help="write it, for predict --captured and convert"
    )
    parser.add_argument("--predict", action="store_true", help="also price the step; with --gpu or --cluster")
    parser.add_argument("--gpu", metavar="G", help="with --predict: a GPU of the catalogue")
    parser.add_argument("--cluster", metavar="C", help="with --predict: a cluster of the catalogue")
    parser.add_argument("--gpus", type=gpu_count, metavar="N", help="with --predict: 1")
    parser.add_argument(
        "--tp", type=gpu_count, metavar="N", help="with --predict: ways linear maps are split, 1"
    )
    parser.add_argument("--pp", type=gpu_count, metavar="N", help="with --predict: pipeline stages, 1")
    parser.add_argument(
        "--global-batch", type=count(1, MOST_SEQUENCES), metavar="N", help="with --predict: sequences"
    )
    parser.add_argument("--sharding", choices=("none", "fsdp"), default="none", help="with --predict: none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


PREDICTING = ("gpu", "cluster", "gpus", "tp", "pp", "global_batch", "sharding")


def run(args: argparse.Namespace) -> int:
    if not args.predict and (given := [name for name in PREDICTING if name in args.given]):
        raise ValueError(f"--{given[0].replace('_', '-')} has no effect without --predict")
    from stepcast.cli.captured import captured_facts, predicted
    from stepcast.outputs.captured import write
    from stepcast.pytorch.load import load_torch

    load_torch("capture")
    from stepcast.pytorch.capture.program import Asked
    from stepcast.pytorch.capture.run import capture

    asked = Asked(
        batch=args.batch,
        seq=args.seq,
        dtype=args.dtype,
        autocast=args.autocast,
        checkpoint=args.checkpoint,
        fused=not args.no_fused_optimizer,
        attention=args.attention,
        experts=args.experts,
        optimizer=args.optimizer,
        compiled=args.compiled,
    )
    captured = capture(args.program, asked)
    found = captured_facts(captured)
    if args.output:
        write_file(args.output, write(captured))
        found["output"] = args.output
    if args.predict:
        prediction, said = predicted(captured, args)
        found["prediction"] = {**said, **prediction.report.facts()}
    if args.json:
        print_json(found)
        return 0
    from stepcast.report.captured import captured_text
    from stepcast.report.step import step_text

    print(captured_text(found, terminal_width()))
    if args.predict:
        print("\n" + step_text(found["prediction"], terminal_width()))
        print_warnings(found["prediction"]["warnings"])
    if args.output:
        print(f"\nwrote {visible(args.output)}: 'stepcast predict --captured' prices it on any GPU")
    print_warnings(captured.warnings)
    return 0
