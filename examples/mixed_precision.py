"""Train in half precision: 16-bit activations, 32-bit weights, a scaled loss.

``ringreduce run -n 2 examples/mixed_precision.py``. `compile` adds the loss scale. An
infinity on one worker is in every worker's mean, so all skip the same steps and keep equal scales.
"""

import argparse
import hashlib
import json
import sys

import digits
import keras
import tensorflow as tf

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--policy", default="mixed_float16", help="or mixed_bfloat16")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=128, help="over all workers together")
parser.add_argument("--accumulate", type=int, default=1, help="steps for each reduction")
parser.add_argument("--compression", default="none", help="none, fp16 or bf16")


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    keras.config.set_dtype_policy(arguments.policy)
    keras.utils.set_random_seed(digits.SEED)
    (pixels, labels), test = digits.load()
    data = tf.data.Dataset.from_tensor_slices((pixels, labels))
    data = rr.shard(data.shuffle(digits.SPLIT, seed=digits.SEED))
    data = data.batch(arguments.batch_size // comm.size, drop_remainder=True)

    model = digits.make_model()
    model.compile(
        optimizer=rr.DistributedOptimizer(
            keras.optimizers.Adam(0.002),
            gradient_accumulation_steps=arguments.accumulate,
            compression=arguments.compression,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(data, epochs=arguments.epochs, shuffle=False, verbose=2 if comm.rank == 0 else 0)
    _, accuracy = model.evaluate(*test, verbose=0)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    scale = getattr(model.optimizer, "dynamic_scale", None)  # bfloat16 needs none
    own = [hashlib.sha256(weights).hexdigest(), None if scale is None else float(scale.numpy())]
    everyone = comm.all_gather_object(own)
    if comm.rank == 0:
        result = {
            "policy": arguments.policy,
            "accuracy": accuracy,
            "steps_applied": int(model.optimizer.iterations.numpy()),
            "loss_scales": [theirs for _, theirs in everyone],
            "weights_sha256": [digest for digest, _ in everyone],
        }
        print(json.dumps(result, indent=2))
    if any(theirs != everyone[0] for theirs in everyone):
        sys.exit("the workers ended with different weights")


if __name__ == "__main__":
    main()
