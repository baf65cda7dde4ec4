"""What each command does, and the steps of a conversion that several of them share.

A source and ``Options`` come in. ``planning`` opens, observes and bounds it and decides a plan, ``convert`` writes the
folder, ``evidence`` measures it; out comes the report, and ``verify`` computes each of its sections again.
"""
