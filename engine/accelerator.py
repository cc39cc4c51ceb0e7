"""What torch tells of an accelerator, and how spans are shown to its vendor's tools. On a CPU there is nothing to tell.

`annotation` names what a span does besides being timed: with torch's own profiler running it is a range there, on CUDA
it is an NVTX range for Nsight Systems. Knows no world and no span.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.profiler import DeviceEvent

log = logging.getLogger(__name__)

Annotate = Callable[[str], AbstractContextManager[object]]


class Gauges:
    """Figures of one device; a driver that cannot tell how busy it is is asked once."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._tells_use = True

    def read(self) -> dict[str, float]:
        """Bytes that tensors hold, bytes that torch has reserved for them, and the share of time in use (0..1)."""
        if self._device.type != "cuda":
            return {}
        found = {
            "device_allocated_bytes": float(torch.cuda.memory_allocated(self._device)),
            "device_reserved_bytes": float(torch.cuda.memory_reserved(self._device)),
        }
        if self._tells_use:
            try:
                found["device_share"] = torch.cuda.utilization(self._device) / 100
            except (ModuleNotFoundError, RuntimeError) as error:  # no NVML bindings, or a driver without them
                log.info("the share of time that %s is in use cannot be told: %s", self._device, error)
                self._tells_use = False
        return found


def device_event(device: torch.device) -> Callable[[], DeviceEvent] | None:
    """What makes marks in the queue of this device; None where times of the clock are the device's own."""
    if device.type != "cuda":
        return None
    return lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def annotation(device: torch.device, *, torch_profile: bool, nvtx: bool) -> Annotate | None:
    """What a span opens besides itself on this device; None when that is nothing."""
    nvtx = nvtx and device.type == "cuda"
    if torch_profile and nvtx:
        return _both
    if torch_profile:
        return record_function
    return _nvtx if nvtx else None


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What torch's profiler should watch."""
    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])


@contextmanager
def torch_profiled(path: Path, device: torch.device) -> Iterator[None]:
    """Run under torch's profiler and write its trace, whatever happens. Raises OSError."""
    watched = profile(activities=activities(device))
    with watched:
        yield
    watched.export_chrome_trace(str(path))


def _nvtx(name: str) -> AbstractContextManager[object]:
    return torch.cuda.nvtx.range(name)


@contextmanager
def _both(name: str) -> Iterator[None]:
    with record_function(name), _nvtx(name):
        yield
