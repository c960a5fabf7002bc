"""What bytes raise that are not ours, in every decoder of this package."""

import msgspec

# Some versions of msgspec let UnicodeDecodeError through, which is a ValueError; and lists in lists
# end where Python's stack does, also in fields that a record does not have.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
