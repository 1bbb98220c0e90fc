"""Benchmarks of kvweave's parts. Each prints its whole configuration, medians and spread."""
