"""Property tests look for new cases on a person's machine and repeat the same ones in continuous integration.

None has a time to keep: on a machine that does other work too, that fails of itself.
"""

import os

from hypothesis import settings

settings.register_profile("explore", deadline=None)
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.load_profile("repeat" if os.environ.get("CI") else "explore")
