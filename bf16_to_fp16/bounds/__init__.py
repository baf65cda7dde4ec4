"""The certificate: a bound at every site of a model, for every input, from its weights alone.

A layout and a reader of its weights come in. ``certificate`` walks along the residual stream and calls one module for
each part of a sublayer; ``arithmetic`` adds fp16's rounding errors, ``spectral`` bounds eigenvalues. Out comes a
``Certificate``: bound and limit of each site."""
