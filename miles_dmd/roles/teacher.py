"""The teacher: a frozen model that scores what the student sampled.

It has no optimizer and is in no checkpoint: its files are.
"""

from miles_dmd.contracts.role import Role

role = Role(pipelines={"teacher_score": "teacher_checkpoint"})
