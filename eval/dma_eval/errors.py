"""The error that a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """Input that cannot work: a name, a file, a value. The message says what came, what was expected and the way out.

    The command line shows it as one line and exits with code 2.
    """


def one_line(error: BaseException, limit: int = 400) -> str:
    """The message of ``error`` on one line of at most ``limit`` characters, without the advice after a blank line."""
    paragraph = str(error).strip().split("\n\n")[0]
    text = " ".join(paragraph.split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
