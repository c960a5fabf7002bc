"""`rr.fit`, `rr.evaluate`, `rr.predict`: their data, their steps, and the loop of epochs."""
