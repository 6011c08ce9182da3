"""The local app: forms whose answers are live pages. Needs the extra ``web``."""
