"""Hooks from a Python file of the user's own, run once at the start: what `--hooks FILE` means.

Knows nothing of what they measure. The file is code: it may do whatever the process may.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from engine.profiler import hooks


class HooksWrong(ValueError):
    """A file of hooks that cannot be used; the message says what was expected and what came."""


def load(path: Path) -> list[str]:
    """Run a file that calls `add_hook`; the names it has registered. Raises HooksWrong."""
    spec = importlib.util.spec_from_file_location(f"hooks_{path.stem}", path)
    if path.suffix != ".py" or not path.is_file() or spec is None or spec.loader is None:
        raise HooksWrong(f"hooks: expected a Python file, got {path}")
    before, module = hooks(), importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # somebody else's code, of which anything can come
        raise HooksWrong(f"hooks: {path} failed with {type(error).__name__}: {error}") from error
    added = [name for name in hooks() if name not in before]
    if not added:
        raise HooksWrong(f"hooks: expected {path} to call engine.profiler.add_hook, got no hook")
    return added
