"""The actor: the student alone, so that nothing but its own step can touch it."""

from miles_dmd.contracts.role import Role

role = Role(pipelines={"student": "hf_checkpoint"})
