"""The report of a conversion, an audit or a finetune. ``build`` makes it, and ``schema`` declares its keys.
``sections`` and ``facts`` make the sentences and rows that terminal, page and card share."""
