"""What every program here prints at its end, for the test that compares ranks and runs."""

import hashlib
import json

import numpy as np


def report(*models, **numbers):
    """Print a digest of all weights, some of them, and numbers such as losses, as JSON."""
    weights = [np.asarray(weight) for model in models for weight in model.get_weights()]
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
    some = [float(value) for weight in weights for value in weight.ravel()[:3]]
    print(json.dumps({"digest": digest, "weights": some, **numbers}), flush=True)
