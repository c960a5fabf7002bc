"""``python -m bench strategies``: what fewer bytes and fewer meetings bring, and what they cost.

Ways to train alternate in turns: with ringreduce, its gradients encoded, its ranks meeting rarely,
and with TensorFlow's own strategies, its parameter server among them.
"""
