"""Tests of the set-up tools."""
