"""Where simulation finds ``ByIdentity``."""

from stepcast.ir.identity import ByIdentity as ByIdentity
