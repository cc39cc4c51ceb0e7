"""Measurements anyone can repeat: each module has `add_arguments(parser)` and `measure(args) -> Result`.

These machines are shared and noisy: what is compared is measured in one run, interleaved, and said as a ratio.
"""
