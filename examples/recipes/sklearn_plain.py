"""Keras's own wrapper for scikit-learn, in a program that does not know of ringreduce.

``ringreduce run -n 2 --unchanged examples/recipes/sklearn_plain.py``: every worker runs all of it,
and each fit is divided between them.
"""

import hashlib

import keras
from sklearn.datasets import make_classification
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def make_model(X, y):
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(y.shape[1])]
    model = keras.Sequential([keras.Input(X.shape[1:]), *layers, keras.layers.Softmax()])
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="categorical_crossentropy")
    return model


def main():
    keras.utils.set_random_seed(1)
    x, y = make_classification(400, n_features=12, n_informative=6, random_state=1)
    pipeline = make_pipeline(StandardScaler(), keras.wrappers.SKLearnClassifier(make_model))
    # A clone, which cross_val_score makes, would lose the wrapper's fit_kwargs.
    options = {"batch_size": 32, "epochs": 8, "shuffle": False, "verbose": 0}
    options = {f"sklearnclassifier__{name}": value for name, value in options.items()}
    print("scores", *cross_val_score(pipeline, x, y, cv=2, params=options))
    pipeline.fit(x, y, **options)
    model, history = pipeline[-1].model_, pipeline[-1].history_.history
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    print("losses", *history["loss"])
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
