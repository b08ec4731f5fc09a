"""One role's models, optimizer and step, over any number of ranks. Knows nothing of Ray."""
