"""The learner: autograd execution with straight-through quantisers, masters and optimiser, the training step."""

from halfbyte.learner.learner import Learner, StepResult
from halfbyte.learner.parameters import Parameters

__all__ = ["Learner", "Parameters", "StepResult"]
