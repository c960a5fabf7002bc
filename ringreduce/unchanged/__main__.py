"""``python -m ringreduce.unchanged train.py``; ``ringreduce run --unchanged`` starts it too."""

import sys

from ringreduce.unchanged.start import main

if __name__ == "__main__":
    main(sys.argv[1:])
