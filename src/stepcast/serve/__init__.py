"""The local app: forms over the command line, answered live by pages. Needs the extra ``web``."""
