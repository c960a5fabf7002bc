"""``python -m ringreduce``, the same as the ``ringreduce`` command."""

from ringreduce.cli import main

main()
