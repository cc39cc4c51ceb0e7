"""A group of ranks, four as a rule, that stays up for a test file and runs case after case, each on some of them.

Rank 0 is the process of the tests; the others wait for the name and the arguments of a case. Every rank runs the case
on its own and compares what it gets with one rank's; the first complaint of any is raised in the test.
"""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from engine.parallel.launch import Group
from engine.parallel.mesh import ExchangeFailed, Mesh, as_bytes
from engine.parallel.rank import Member
from engine.parallel.split import Layout

RANKS = 4
Case: TypeAlias = Callable[..., object]


class Lab:
    """What the tests see of the group."""

    def __init__(self, group: Group, cases: str) -> None:
        self.group, self.mesh, self._cases = group, group.join(), cases

    @classmethod
    def open(cls, cases: str, ranks: int = RANKS) -> Lab:
        """`cases`: the module whose functions are run, each given the mesh and the case's arguments."""
        return cls(Group.start(ranks, "tests.parallel_lab:serve", cases, patience_s=20), cases)

    def run(self, case: str, ranks: int, **arguments: Any) -> object:
        """The result of rank 0. Raises AssertionError with what any rank has to say."""
        with self.group.guarded():
            self.mesh.tell(json.dumps([case, ranks, arguments]).encode())
            return _run(self.mesh, self._cases, case, ranks, arguments)

    def close(self) -> None:
        with self.group.guarded():
            self.mesh.tell(b"")
        self.group.wait(30)
        self.group.close()


def serve(member: Member) -> None:
    """What the other ranks do."""
    torch.set_num_threads(1)
    mesh = member.join()
    while order := mesh.tell(None):
        case, ranks, arguments = json.loads(order)
        try:
            _run(mesh, member.argument, case, ranks, arguments)
        except AssertionError:
            continue  # rank 0 has the same complaint


def _run(mesh: Mesh, cases: str, case: str, ranks: int, arguments: dict[str, Any]) -> object:
    found: Case = getattr(importlib.import_module(cases), case)
    result, complaint = None, ""
    for layout in (arguments[name] for name in ("layout", "then") if name in arguments):
        mesh.prepare(Layout(*layout))  # those who sit a case out take part in making its groups
    try:
        result = found(mesh, ranks, **arguments) if mesh.rank < ranks else None
    except ExchangeFailed:
        raise
    except Exception:
        complaint = traceback.format_exc()
    said = _all(mesh, complaint)
    if any(said):
        raise AssertionError("\n".join(f"rank {r}: {text}" for r, text in enumerate(said) if text))
    return result


def _all(mesh: Mesh, text: str) -> list[str]:
    """What each rank says."""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    sizes = [int(x.view(torch.int64)) for x in mesh.everyone.gather(as_bytes(size), [8] * mesh.ranks, "said")]
    return [bytes(x.numpy()).decode().strip() for x in mesh.everyone.gather(data, sizes, "said")]
