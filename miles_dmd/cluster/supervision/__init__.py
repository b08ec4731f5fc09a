"""Supervision of Ray and of a run's actors: started or joined, authenticated, watched, waited for, ended."""
