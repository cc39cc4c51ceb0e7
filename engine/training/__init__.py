"""How `tiny-world` was trained, and the pieces to turn a model of yours into a block model of few steps.

Read in this order: `forcing.py` the reusable pieces, `recipe.py` the stages; then what they use: `painting.py`,
`lighting.py` and `renderer.py` the world, `data.py` clips, `codec.py`, `memory.py`, `transformer.py` and `decoder.py`
the losses, `optimiser.py` and `run.py` the loop; `truth.py` and `evaluate.py` what came of it.
"""
