"""How a command says what it cannot do: one line, whatever the words in it hold. Knows no command."""

from __future__ import annotations

from rich.console import Console


def refuse(console: Console, command: str, error: Exception) -> None:
    """`inferix COMMAND: why`. What looks like markup is printed as it is."""
    say(console, f"inferix {command}: {error}", style="red")


def say(console: Console, text: str, style: str | None = None) -> None:
    """A line with paths and other people's words in it."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Without what no terminal and no JSON can hold: a path's bytes that are no text become question marks."""
    return text.encode(errors="replace").decode()
