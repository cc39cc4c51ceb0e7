"""What this process takes of its machine: memory now, and the share of a core since the last look. Knows no torch."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

_STATM = Path("/proc/self/statm")


class Usage:
    """Figures of this process as of the last `read`."""

    def __init__(self) -> None:
        self.rss_bytes = 0
        self.cpu_share = 0.0  # of one core; 2.0 is two cores busy
        self._wall_s, self._cpu_s = time.monotonic(), time.process_time()
        self.read()

    def read(self) -> None:
        wall_s, cpu_s = time.monotonic(), time.process_time()
        if wall_s > self._wall_s:
            self.cpu_share = (cpu_s - self._cpu_s) / (wall_s - self._wall_s)
        self._wall_s, self._cpu_s = wall_s, cpu_s
        self.rss_bytes = rss_bytes()


def rss_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the most it ever was, in bytes there and in kilobytes elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
