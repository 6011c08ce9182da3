"""Property tests look for new cases on a person's machine and repeat the same ones in continuous integration."""

import os

from hypothesis import settings

settings.register_profile("explore")
settings.register_profile("repeat", derandomize=True)
settings.load_profile("repeat" if os.environ.get("CI") else "explore")
