"""``python -m stepcast``."""

import sys

from stepcast.cli.main import main

sys.exit(main())
