"""The commands, and the steps of a conversion that several commands share.

``planning`` opens, observes and bounds a source under given ``Options`` and decides a plan, ``convert`` writes the
folder, ``evidence`` measures it. The result is the report; ``verify`` computes each of its sections again."""
