"""What `python -m kvweave` does about layouts: `plan`, `volume` and `advise`.

One module per command with `add_options(parser)` and `run(options)`, which returns the exit code. They print; the
arithmetic and the words are in `layouts`. `drawing` alone needs matplotlib and is imported when a picture is asked for.
"""
