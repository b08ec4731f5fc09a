"""Models, optimizer and step of one role, over any number of ranks. Knows nothing of Ray."""
