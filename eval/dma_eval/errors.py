"""The error for invalid input."""

from __future__ import annotations


class UserError(Exception):
    """Invalid input: a name, a file or a value. The message says what was given, what was expected and the way out.

    The command line shows it as one line and exits with code 2.
    """


def one_line(error: BaseException, limit: int = 400) -> str:
    """Return the first paragraph of an error's message as one line of at most ``limit`` characters."""
    paragraph = str(error).strip().split("\n\n")[0]
    text = " ".join(paragraph.split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
