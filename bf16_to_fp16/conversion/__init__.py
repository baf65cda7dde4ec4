"""The commands, and the steps of a conversion that several commands share.

``planning`` opens, observes and bounds a source under given ``Options`` and decides a plan. ``convert`` writes the
folder, and ``evidence`` measures it. The result is the report, whose sections ``verify`` computes again."""
