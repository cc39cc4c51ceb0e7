"""Inferix, the compute side: it makes worlds a block at a time.

How one block travels, in the order of the files:

 1. `protocol.py`   commands come in, events go out; nothing else crosses to the server
 2. `link.py`       the engine's end of that connection
 3. `loop.py`       one turn: receive, schedule, generate, decode, play out
 4. `scheduler.py`  whose block is due first
 5. `world.py`      one world: its signals (`signals.py`), its cache, its random stream, its clock
 6. `generator.py`  one block: noise, then the steps of a sampler (`samplers.py`, `staggered.py`), then the clean pass
 7. `kvcache/`      what the block sees of the past, and what it leaves behind
 8. `models/`       weights and arithmetic behind one contract; `layers/` below them
 9. `decoder.py`    latents to pictures
10. `playout.py`    each picture at its media time, through `encoder.py`, once per world

Beside the path: `room.py` (who is let in), `telemetry.py` (what is told of it all), `plan.py` (what a model needs),
`weights.py` (checkpoints), `profiler.py`, `journal.py` (replay), `parallel/` (a world on many ranks),
`lvbench/` (does it drift?) and `training/` (where the shipped model comes from).
"""
