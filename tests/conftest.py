"""What all tests share: one computing thread. Tensors this small only make threads wait for one another."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is first imported, here and in child processes
