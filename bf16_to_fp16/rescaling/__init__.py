"""The plan of exponents: the cost of each power of two, the choice of exponents, and their application to weights.

The input is a layout with ranges and bounds of its sites. ``planner`` returns a ``Plan``, which is data. Only ``apply``
scales weights by a plan, in a stream of tensors or in memory, and changes the config to match."""
