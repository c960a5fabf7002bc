"""Text classification: a vocabulary from a dataset, shuffled without a seed."""

import keras
import tensorflow as tf
from keras import layers

words = ["good", "bad", "fine", "awful", "film", "plot", "cast"]
texts = tf.constant([" ".join(words[(i + k) % 7] for k in range(4)) for i in range(84)])
labels = tf.constant([i % 2 for i in range(84)])
raw = tf.data.Dataset.from_tensor_slices((texts, labels)).shuffle(84).batch(12)
vectorize = layers.TextVectorization(max_tokens=20, output_sequence_length=5)
vectorize.adapt(raw.map(lambda x, y: x))
train = raw.map(lambda x, y: (vectorize(x), y)).cache().prefetch(2)
model = keras.Sequential(
    [
        keras.Input(shape=(None,), dtype="int64"),
        layers.Embedding(20, 8),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(train, validation_data=train.take(2), epochs=2)
whole = keras.Sequential([keras.Input((), dtype="string"), vectorize, model])
results = [float(one) for one in whole.predict(texts[:4])[:, 0]]
