"""The report of a conversion, an audit or a finetune: built once, shown on the terminal, as a page and as a card.

``build`` makes the report with its verdict and remedies from the results of a conversion's steps; ``schema`` declares
its keys. ``sections`` and ``facts`` make the sentences and rows that terminal, page and card share."""
