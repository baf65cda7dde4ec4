"""The report of a conversion, an audit or a finetune: built once, shown on the terminal, as a page and as a card.

What was opened, decided, written and measured comes in. ``build`` gives the report, whose keys ``schema`` declares,
with its verdict and remedies. ``sections`` and ``facts`` give the sentences and rows that all three renderings share.
"""
