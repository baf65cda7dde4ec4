"""The certificate: bounds of a model's values for any input, computed from its weights alone.

Every site, which is one operation's output, has a bound. The module ``certificate`` walks along the residual stream and
calls one module for each part of a sublayer, that is of an attention or a feed-forward."""
