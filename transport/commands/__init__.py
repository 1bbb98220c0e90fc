"""What `python -m kvweave` does about nodes and their control ports: `keys` and `doctor`.

One module per command with `add_options(parser)` and `run(options)`, which returns the exit code. They need no vLLM.
"""
