"""What Prometheus is told. One object per application, so that two in one process do not mix their numbers.

Names: `inferix_<what>_<unit>`, `_total` for counters. Label values come from closed sets, never from users.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
PHASES = frozenset(
    "encode_prompt denoise clean commit cache_write gather offload decode colour encode send wait total".split()
)


class Metrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.sessions = Gauge("inferix_sessions", "Sessions by state.", ["state"], registry=registry)
        self.viewers = Gauge("inferix_viewers", "Connected viewers.", registry=registry)
        self.outputs = Gauge("inferix_outputs", "Outputs by kind and state.", ["kind", "state"], registry=registry)
        self.blocks = Counter("inferix_blocks", "Blocks generated.", registry=registry)
        self.frames = Counter("inferix_frames", "Pictures generated.", registry=registry)
        self.block_seconds = Histogram(
            "inferix_block_seconds", "Time of a block by phase.", ["phase"], buckets=SHORT_S, registry=registry
        )
        self.deadline_misses = Counter("inferix_deadline_misses", "Blocks that came late.", registry=registry)
        self.real_time_factor = Gauge(
            "inferix_real_time_factor_ratio", "Media seconds per second spent, slowest world.", registry=registry
        )
        self.prompt_seconds = Histogram(
            "inferix_prompt_to_packet_seconds",
            "From a prompt's arrival to the first packet made under it.",
            buckets=SHORT_S,
            registry=registry,
        )
        self.packets_sent = Counter("inferix_packets_sent", "Packets taken by outputs.", ["kind"], registry=registry)
        self.packets_dropped = Counter(
            "inferix_packets_dropped", "Packets an output did not get.", ["kind"], registry=registry
        )
        self.keyframe_requests = Counter("inferix_keyframe_requests", "Asked of the engine.", registry=registry)
        self.rtmp_reconnects = Counter("inferix_rtmp_reconnects", "RTMP connections lost.", registry=registry)
        self.cache_bytes = Gauge("inferix_kv_cache_bytes", "Cache of all worlds by tier.", ["tier"], registry=registry)
        self.engine_up = Gauge("inferix_engine_up", "1 when the engine is ready.", registry=registry)
        self.engine_restarts = Counter("inferix_engine_restarts", "Engine processes lost.", registry=registry)
        self.engine_rss_bytes = Gauge("inferix_engine_resident_memory_bytes", "Of the engine.", registry=registry)
        self.queue_depth = Gauge("inferix_queue_depth", "Things waiting.", ["queue"], registry=registry)
        self.loop_lag_seconds = Histogram(
            "inferix_event_loop_lag_seconds", "Lateness of a timer in the server.", buckets=SHORT_S, registry=registry
        )
        self.requests = Counter("inferix_http_requests", "HTTP answers.", ["status"], registry=registry)
        self.refused = Counter("inferix_sessions_refused", "Sessions refused for capacity.", registry=registry)
        self.custom = Gauge("inferix_world_metric", "Custom metrics of worlds, mean.", ["name"], registry=registry)

    def observe_block(self, phases_ms: dict[str, float], frames: int, due_in_ms: float) -> None:
        self.blocks.inc()
        self.frames.inc(frames)
        if due_in_ms < 0:
            self.deadline_misses.inc()
        for phase, ms in phases_ms.items():
            self.block_seconds.labels(phase if phase in PHASES else "other").observe(ms / 1000)

    def text(self) -> bytes:
        return generate_latest(self.registry)
