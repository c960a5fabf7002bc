"""``python -m ringreduce``, the same as the ``ringreduce`` command."""

from ringreduce.commands.cli import main

main()
