"""The certificate: a bound at every site of a model, for every input, from its weights alone.

``certificate`` walks along the residual stream and calls one module for each part of a sublayer."""
