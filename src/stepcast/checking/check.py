"""``check(trainer)``: a forecast before the first step of a script, and a comparison after some."""

from typing import Any

from stepcast.checking.described import describe
from stepcast.checking.hooks import add_to_trainer
from stepcast.checking.run import RunCheck, Write


def check(
    script: Any = None,
    *,
    model: Any = None,
    strict: bool = False,
    compare_after: int = 20,
    write: Write | None = None,
    **choices: Any,
) -> RunCheck:
    """Write the forecast of a training script before its first step, and compare it with the first steps.

    Args:
        script: a Trainer (transformers, TRL), an Accelerator, a Trainer of Lightning, torchtitan's job_config or
            Megatron-LM's arguments; without one, *choices* describe the run.
        model: the model, where *script* does not hold it: a module with a Hugging Face config, or a name.
        strict: raise a RunDoesNotFitError if the run does not fit into GPU memory.
        compare_after: steps after which they are compared with the forecast.
        write: takes each line (default: print, on the first rank).
        choices: choices of ``stepcast.predict`` that win over what *script* says, such as ``gpu="h100-sxm"``.
    """
    named = {"model": model} if isinstance(model, str) else {}
    is_lightning = hasattr(script, "callbacks") and hasattr(script, "fit")
    described = describe(None if is_lightning else script, model)
    run = RunCheck({**described, **named, **choices}, strict=strict, compare_after=compare_after, write=write)
    run.forecast()
    add_to_trainer(script, run)
    return run
