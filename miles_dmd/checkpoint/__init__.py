"""Whole-run checkpoints on disk: manifest, atomic publication, verification.

Knows neither torch nor Ray: tensors are written by those who hold them, and here they are files with checksums.
"""
