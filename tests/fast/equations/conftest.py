"""Property tests here have no deadline: the first torch call of a process alone takes half a second."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
