"""Models: architecture, checkpoints, tokenizer, and the one decoder over the ``Execution`` protocol."""

from halfbyte.models.architecture import Architecture, parameter_count, parameter_shapes, parameters_by_site, site_of
from halfbyte.models.checkpoint import Checkpoint, load_checkpoint
from halfbyte.models.checkpoint_writer import save_checkpoint
from halfbyte.models.layout import ParameterLayout, checkpoint_views, from_checkpoint

__all__ = [
    "Architecture",
    "Checkpoint",
    "ParameterLayout",
    "checkpoint_views",
    "from_checkpoint",
    "load_checkpoint",
    "parameter_count",
    "parameter_shapes",
    "parameters_by_site",
    "save_checkpoint",
    "site_of",
]
