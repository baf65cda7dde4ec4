"""The commands, and the steps of a conversion that several commands share.

``planning`` decides a plan for a source. ``convert`` writes the folder, and ``evidence`` measures it. ``verify``
computes the report's sections again."""
