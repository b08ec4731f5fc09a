"""A whole run on disk: what a checkpoint consists of, how it comes to be whole or absent, and how it is verified.

Knows neither torch nor Ray: tensors are written by those who hold them, and here they are files with checksums.
"""
