"""Trainer groups and the rollout worker as Ray actors. The only home of Ray."""
