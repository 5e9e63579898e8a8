"""The trainer's side: tensors out of a training loop, by any transport, as one committed update of the fleet.

torch is needed only for sources that are made of torch tensors; it is imported when one is used.
"""
