"""Sampling arithmetic without tensors: noise levels, stop steps, and which rank holds which sample."""
