"""``python -m stepcast``."""

import sys

from stepcast.cli.start import main

sys.exit(main())
