"""The one exception a user is meant to see.

Everything that is the input's fault raises ``UserError`` with a message of one line that names the file or
tensor and says how to mend it. The command line prints it as ``error: …`` and exits with status 2; any other
exception is a bug of this package and keeps its traceback.
"""


class UserError(Exception):
    """Input that cannot be used; the message names what is wrong and how to mend it, in one line."""
