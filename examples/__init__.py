"""Runnable examples: launch scripts, proxy, demo. They use kvweave from outside, as any deployment would."""
