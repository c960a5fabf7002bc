"""The folder of this user for temporary files that processes of a host share."""

import contextlib
import os
import stat
import tempfile


def own_folder() -> str:
    """Return the path of a folder that only this user can enter or exchange; made if need be.

    Raises OSError if something else has its name, or somebody else could put another in its place.
    """
    above, user = tempfile.gettempdir(), os.geteuid()
    folder = os.path.join(above, f"ringreduce-{user}")
    with contextlib.suppress(FileExistsError):  # Of a file, or a link, the next lines tell.
        os.makedirs(folder, 0o700, exist_ok=True)
    inner, outer = os.lstat(folder), os.stat(above)
    if not stat.S_ISDIR(inner.st_mode):
        raise NotADirectoryError(f"{folder} is no folder, but a file that another program has made")
    if inner.st_uid != user:
        raise PermissionError(f"{folder} belongs to another user, of number {inner.st_uid}")
    if inner.st_mode & 0o077:
        mode = stat.S_IMODE(inner.st_mode)
        raise PermissionError(f"other users may enter {folder}: its mode is {mode:o}, not 700")
    # Whoever may write beside it may rename it, unless the sticky bit is set, as for /tmp.
    stays = outer.st_mode & stat.S_ISVTX or not outer.st_mode & 0o022
    if not stays or outer.st_uid not in (0, user):
        raise PermissionError(f"other users may put another folder in place of {folder}")
    return folder
