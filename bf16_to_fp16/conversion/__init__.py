"""What each command does, and the steps of a conversion that several of them share.

A source and ``Options`` come in. ``planning`` opens, bounds and observes it and decides a plan, ``rewriting`` writes
the folder, ``evidence`` measures it; out comes the report, and ``verify`` computes each of its sections again.
"""
