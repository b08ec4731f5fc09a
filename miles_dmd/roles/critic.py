"""The critic: fake score and frozen teacher.

Both look at the same noised sample, so they share a device.

The fake score stands for the student's distribution, so it starts from the same weights as the student; name others
with ``--critic-hf-checkpoint``, and the teacher, which would follow, with ``--teacher-checkpoint``.
"""

from miles_dmd.contracts.role import Role

role = Role(pipelines={"fake_score": "hf_checkpoint", "teacher_score": "teacher_path"})
