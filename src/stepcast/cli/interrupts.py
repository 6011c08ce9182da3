"""What verbs need to know of interrupts; the command's start, which loads nothing else, has it."""

from stepcast.cli.start import INTERRUPTED as INTERRUPTED
from stepcast.cli.start import end_on_interrupt as end_on_interrupt
