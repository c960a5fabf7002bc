"""The same training as digits.py under TensorFlow's own MirroredStrategy, for comparison.

One process, two logical CPUs as replicas, or plain Keras with one; model, data, order and global
batch are those of digits.py.
"""

import json
import time

import digits
import keras
import numpy as np
import tensorflow as tf


def main():
    digits.parser.add_argument("--replicas", type=int, default=2)
    arguments = digits.parser.parse_args()
    strategy = tf.distribute.get_strategy()
    if arguments.replicas > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * arguments.replicas
        tf.config.set_logical_device_configuration(cpu, parts)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(arguments.replicas)])
    keras.utils.set_random_seed(digits.SEED)
    (pixels, labels), test = digits.load()
    data = tf.data.Dataset.from_tensor_slices((pixels, labels))
    data = data.shuffle(digits.SPLIT, seed=digits.SEED)
    data = data.batch(arguments.batch_size, drop_remainder=True)

    with strategy.scope():
        model = digits.make_model()
        model.compile(
            optimizer=keras.optimizers.get(arguments.optimizer),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    clock = [time.perf_counter()]
    callbacks = [digits.EpochClock(clock)]
    model.fit(data, epochs=arguments.epochs, shuffle=False, verbose=2, callbacks=callbacks)
    # Evaluated outside the strategy, as for the other systems.
    weights = model.get_weights()
    plain = digits.make_model()
    plain.set_weights(weights)
    plain.compile(loss=model.loss, metrics=["accuracy"])
    loss, accuracy = plain.evaluate(*test, verbose=0)
    result = {
        "workers": strategy.num_replicas_in_sync,
        "epochs": arguments.epochs,
        "loss": loss,
        "accuracy": accuracy,
        "samples_per_s": digits.samples_per_s(clock, arguments.batch_size),
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file)
    if arguments.save_weights:
        np.savez(arguments.save_weights, *weights)


if __name__ == "__main__":
    main()
