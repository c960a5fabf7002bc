"""A classifier for scikit-learn's pipelines, each of whose fits trains on two workers.

``python examples/recipes/sklearn_pipeline.py``. The program itself is one process; what a fit of
the classifier learns are arrays.
"""

import argparse
import json

import keras
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import make_classification
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ringreduce

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--workers", type=int, default=2, help="of each fit")
parser.add_argument("--folds", type=int, default=2)


def make_model(features, units, classes):
    """An uncompiled classifier."""
    layers = [keras.layers.Dense(units, activation="relu"), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input((features,)), *layers])


def train(x, labels, units, classes, epochs):
    """On each worker of a fit."""
    import ringreduce.keras as rr

    rr.init()
    keras.utils.set_random_seed(1)
    model = make_model(x.shape[1], units, classes)
    model.compile(
        optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.02)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rr.fit(model, x, labels, batch_size=32, epochs=epochs, verbose=0)
    return model.get_weights()


class RingClassifier(ClassifierMixin, BaseEstimator):
    """A network that `workers` processes train."""

    def __init__(self, units=16, epochs=8, workers=2):
        self.units = units
        self.epochs = epochs
        self.workers = workers

    def fit(self, x, y):
        self.classes_, labels = np.unique(y, return_inverse=True)
        arguments = x, labels, self.units, len(self.classes_), self.epochs
        self.weights_, *_ = ringreduce.launch(train, self.workers, *arguments, output="failed")
        return self

    def predict(self, x):
        model = make_model(x.shape[1], self.units, len(self.classes_))
        model.set_weights(self.weights_)
        return self.classes_[model.predict(x, verbose=0).argmax(axis=1)]


def main():
    arguments = parser.parse_args()
    x, y = make_classification(400, n_features=12, n_informative=6, random_state=1)
    y = np.array(["no", "yes"])[y]
    pipeline = make_pipeline(StandardScaler(), RingClassifier(workers=arguments.workers))
    scores = cross_val_score(pipeline, x, y, cv=arguments.folds, error_score="raise")
    print(json.dumps({"scores": scores.tolist()}))


if __name__ == "__main__":
    main()
