"""LV-Bench: does a long world drift?

Read in this order: `vde.py` the formula · `video.py` frames from a file · `measures.py` the contract of a set of
measures · `classic.py` the set without weights (`pixels.py`, `motion.py`, `appearance.py`) · `published.py` the set
of the papers (`networks.py`) · `judge.py` one video, one verdict · `report.py` the page · `dataset.py` LV-Bench's
layout · `live.py` the meter on a running world · `faults.py` what the measures are proved with · `cli.py` the
command.
"""
