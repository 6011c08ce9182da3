"""``stepcast capture CONFIG|module:function -o FILE``: a PyTorch training step, without a GPU."""

import argparse

from stepcast.cli.captured import captured_facts, predict_program, shown_gpu
from stepcast.cli.options import option_of
from stepcast.cli.output import origin, print_json, print_warnings, terminal_width, write_file, write_view
from stepcast.forecast.prediction import roofline
from stepcast.outputs.plain import write_captured
from stepcast.pytorch.load import load_torch
from stepcast.questions.question import PredictQuestion
from stepcast.views.documents import captured_view
from stepcast.views.step import step_view
from stepcast.views.terminal import render_text
from stepcast.views.text import visible

SETTINGS = "batch seq dtype autocast checkpoint attention experts optimizer no_fused_optimizer compiled tf32"
PROGRAM_OPTIONS = frozenset(SETTINGS.split())
PREDICTING = ("gpu", "cluster", "gpus", "tp", "pp", "global_batch", "sharding", "zero_gradients", "calibration")


def run(args: argparse.Namespace) -> int:
    if not args.predict and (given := [name for name in (*PREDICTING, "html") if name in args.given]):
        raise ValueError(f"{option_of(given[0])} has no effect without --predict")
    load_torch("capture")
    from stepcast.pytorch.capture.program import CaptureOptions
    from stepcast.pytorch.capture.run import capture, capture_command, is_command

    is_script = is_command(args.program, args.words)
    shapes = args.batch if isinstance(args.batch, str) else ""
    if shapes and not is_script:
        raise ValueError(f"--batch {visible(shapes)}: shapes are those of a script's batches; give a number")
    stated = {name: getattr(args, name) for name in (*PROGRAM_OPTIONS, "given") if name != "no_fused_optimizer"}
    options = CaptureOptions(**{**stated, "batch": 1 if shapes else args.batch}, fused=not args.no_fused_optimizer)
    question = PredictQuestion(**{name: getattr(args, name) for name in PREDICTING if name in args.given})
    if args.tf32 and not args.autocast and args.dtype != "fp32":
        raise ValueError("--tf32 has no effect: only fp32 matmuls run as TF32; use --dtype fp32")
    if is_script:
        for name in sorted((args.given & PROGRAM_OPTIONS) - ({"batch"} if shapes else set())):
            raise ValueError(f"{option_of(name)} has no effect on a script: the script decides it; leave it out")
        captured = capture_command([args.program, *args.words], args.gpus or 1, shown_gpu(question), shapes)
    else:
        if args.words:
            raise ValueError(f"{visible(args.words[0])}: one program at a time; a command begins with python, torchrun,"
                             " accelerate or a .py file")  # fmt: skip
        captured = capture(args.program, options)
    found = captured_facts(captured)
    if args.output:
        write_file(args.output, write_captured(captured))
        found["output"] = args.output
    if args.predict:
        prediction, asked = predict_program(captured, question)
        found["prediction"] = {**asked, **prediction.report.facts()}
        if args.html:
            facts = {**found["prediction"], **origin(args)}
            write_view(args, step_view(facts, prediction.drawn, roofline(prediction)))
    if args.json:
        print_json(found)
        return 0
    print(render_text(captured_view(found), terminal_width()))
    if args.predict:
        print("\n" + render_text(step_view(found["prediction"]), terminal_width()))
        print_warnings(found["prediction"]["warnings"])
    if args.output:
        print(f"\nwrote {visible(args.output)}: 'stepcast predict --captured' predicts it on any GPU")
    if not args.predict:
        print_warnings(captured.warnings)
    return 0
