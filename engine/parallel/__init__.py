"""One world on many ranks, without its model, sampler or generator knowing.

split.py     who holds what: tokens and heads by rank, integers only
mesh.py      the ranks of a group and how bytes go between them; every byte is counted
ulysses.py   tokens to heads and back, around `attend()`
ring.py      attention over keys that are spread by token: keys go round, or queries do
deal.py      which ranks of a pipeline compute which blocks in flight, and whose keys go where, integers only
pipeline.py  a rank's part in such a pass: keys of older blocks come, velocities are gathered at the end
cache.py     a KV cache of which each rank holds its share, and the context that goes with it
guidance.py  the parts of a guided step on teams of ranks; which parts, and whose, says engine/parts.py
choose.py    the cost model: which strategy is the fastest, and why; probe.py measures what it counts with
passes.py    what a step of blocks in flight costs, its blocks and branches shared or dealt out
wish.py      from what was asked for to a grid of ranks
launch.py    starts ranks, notices one that dies or hangs, ends the group and names it; rank.py is a started one
plan.py      what rank 0 tells the others; crew.py says it before each thing that is done to a world, and obeys it
bands.py     decoding shared: each rank makes a band of the pictures, beside its passes
lead.py      a live engine's ranks; together.py, those of a roll-out
torchrun.py  ranks that torchrun has started, on several machines
memory.py    bytes per rank before anything is allocated
bench.py     every way to share, measured, predicted, chosen: calls of attention (bench_calls.py), steps of blocks in
             flight (bench_stages.py); picture.py draws the crossover
"""
