"""`tiny-world`: the block-diffusion world model that ships with the engine, trained by `engine/training/`.

Read in this order: `planet.py` the facts of the world, `text.py` prompts, `camera.py` actions, `memory.py` and
`network.py` the network, `decoder.py` latents to pictures, `model.py` all of it behind the engine's contract.
"""
