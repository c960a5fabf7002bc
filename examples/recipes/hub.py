"""Train a text classifier of KerasHub, with random weights and its own preprocessor.

``ringreduce run -n 2 examples/recipes/hub.py``. Nothing is downloaded: the model is tiny, and its
words are those of the made-up sentences.
"""

import argparse
import hashlib

import keras
import keras_hub
import numpy as np

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=6)
GOOD, BAD = ["good", "fine", "great", "warm"], ["bad", "poor", "awful", "cold"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "day", "was", *GOOD, *BAD]


def load():
    """Sentences, and whether each is a good one."""
    chance = np.random.default_rng(0)
    labels = chance.integers(0, 2, 96)
    texts = [f"the day was {chance.choice(GOOD if label else BAD)}" for label in labels]
    return np.array(texts), labels


def make_model():
    """An uncompiled classifier of one small layer."""
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS, lowercase=True)
    return keras_hub.models.BertTextClassifier(
        backbone=keras_hub.models.BertBackbone(
            vocabulary_size=len(WORDS),
            num_layers=1,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
            dropout=0.0,  # So that two ranks train as one does.
            max_sequence_length=8,
        ),
        num_classes=2,
        dropout=0.0,
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8),
    )


def main():
    arguments = parser.parse_args()
    rr.init()
    keras.utils.set_random_seed(1)
    texts, labels = load()
    model = make_model()
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.03)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = rr.fit(model, texts, labels, batch_size=16, epochs=arguments.epochs, verbose=0)
    scores = rr.evaluate(model, texts, labels, batch_size=16, verbose=0, return_dict=True)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    print("losses", *history.history["loss"])
    print("accuracy", scores["accuracy"], "weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
