"""Plug-ins that compute what dmd2 and the in-process engine do, and go wrong where a test says so.

A test writes ``<what> <place> <count>`` into the file ``order`` of the directory that $FAULTS names: whoever comes to
``place`` for the ``count``-th time in its process then

    hold     says so in a file of that name, and waits until the order is gone
    raise    raises, on rank 1
    break    raises, and so do full (the disk is) and refuse (an argument)
    nan      makes the loss not finite, on the rank that has sample ``count``

Everybody who comes to a place leaves its process id in a file ``pid-<who>``.
"""
