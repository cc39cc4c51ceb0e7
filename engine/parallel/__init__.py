"""One world on many ranks, without its model, sampler or generator knowing.

split.py     who holds what: tokens and heads by rank, integers only
mesh.py      the ranks of a group and how bytes go between them; every byte is counted
ulysses.py   tokens to heads and back, around `attend()`
ring.py      attention over keys that are spread by token: keys go round, or queries do
cache.py     a KV cache of which each rank holds its share, and the context that goes with it
choose.py    the cost model: which strategy is the fastest, and why; probe.py measures what it counts with
wish.py      from what was asked for to a grid of ranks
launch.py    starts ranks, notices one that dies or hangs, ends the group and names it; rank.py is a started one
plan.py      what rank 0 tells the others; crew.py says it before each thing that is done to a world, and obeys it
bands.py     decoding shared: each rank makes a band of the pictures, beside its passes
lead.py      a live engine's ranks; together.py, those of a roll-out
torchrun.py  ranks that torchrun has started, on several machines
memory.py    bytes per rank before anything is allocated
bench.py     strategy x ranks x cache length: measured, predicted, chosen; picture.py draws the crossover
"""
