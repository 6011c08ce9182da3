"""The one error a reader may raise."""


class FormatError(ValueError):
    """A file that is not what its format promises; its text names the file and the line."""

    def __init__(self, message: str, path: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.line = line

    def __str__(self) -> str:
        where = [part for part in (self.path, self.line and str(self.line)) if part]
        return ": ".join([":".join(where), self.message]) if where else self.message

    def at(self, path: str) -> "FormatError":
        """The same error with the file named, unless it already names one."""
        return FormatError(self.message, self.path or path, self.line)
