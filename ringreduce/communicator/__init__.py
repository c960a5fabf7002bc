"""The public object, how it is formed, and the process's default one."""
