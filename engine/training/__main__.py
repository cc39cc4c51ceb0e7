"""`python -m engine.training`: the same as `inferix train`."""

import argparse

from engine.training.cli import add_arguments, run

parser = argparse.ArgumentParser("python -m engine.training", description=__doc__)
add_arguments(parser)
raise SystemExit(run(parser.parse_args()))
