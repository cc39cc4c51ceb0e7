"""The command line's compute-side commands. Each module has `add_arguments(parser)` and `run(args) -> exit status`."""
