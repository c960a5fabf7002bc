"""Calls the function of `launch` in a worker, and writes its result.

Runs as a script, whose two arguments are inherited descriptors of nameless files: what
`function.py` wrote, and where the result goes. Imports only the standard library until it has the
caller's `sys.path`. Both files are the same user's; nothing from a network is unpickled.
"""

import linecache
import mmap
import os
import pickle
import sys


def main(function_fd: int, result_fd: int) -> None:
    """Read the function and its arguments, call it, and write what it returns."""
    # Mapped, not read: all workers share the file's position.
    with mmap.mmap(function_fd, 0, access=mmap.ACCESS_READ) as sent:
        path, sys.argv, sources = pickle.load(sent)
        sys.path[:] = path
        linecache.cache.update(sources)
        function, args = pickle.load(sent)
    os.close(function_fd)
    result = function(*args)
    import cloudpickle

    with open(result_fd, "wb") as file:
        file.truncate(0)  # An attempt before a restart may have written, too.
        try:
            cloudpickle.dump(result, file)
        except Exception as error:
            raise TypeError(
                f"the function's result, a {type(result).__name__}, cannot be pickled: {error}"
            ) from None


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
