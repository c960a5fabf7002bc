"""How collectives and training scale: a model fitted to two ranks, checked, and extended.

`model` has the formulas, `fit` finds their parameters, `rings` measures real rings, `check` lists
what is measured and how far off the model is, `training` simulates steps and failures, and
`run` puts these together and draws.
"""
